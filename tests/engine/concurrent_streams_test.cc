// Promise 3 on every device: what a request gets does not depend on what else runs, on how often it is asked,
// or on whether steps are recorded.
#include <gtest/gtest.h>

#include <map>

#include "engine/engine.h"
#include "gpu.h"
#include "places.h"

namespace nibble {
namespace {

std::unique_ptr<Engine> load(const std::string& device, int64_t parallel, bool graphs = true) {
  EngineOptions options = {
      .model = demo_directory(), .device = device, .context = 128, .parallel = parallel, .prefill_chunk = 16};
  options.backend.cuda_graphs = graphs;
  auto engine = Engine::load(FileSystem::posix(), options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(engine).value();
}

using Tokens = std::vector<int32_t>;

// Every second one greedy; prompts and answers of many lengths.
Request request(Engine& engine, size_t i) {
  const std::string words[] = {"Once upon a time", " there was", " a king",  " who had", " three daughters",
                               ", and the",        " youngest",  " of them", " said"};
  std::string prompt = i % 3 == 0 ? "In the forest" : "The fox";
  for (size_t w = 0; w < i % 10; ++w) prompt += words[(i + w) % std::size(words)];
  Request r;
  r.prompt = engine.tokenizer().encode(prompt).value();
  r.sampling.seed = i;
  if (i % 2 == 0) r.sampling.temperature = 0;
  r.max_tokens = 8 + static_cast<int64_t>(i * 5 % 17);
  r.ignore_eos = true;
  return r;
}

void step(Engine& engine, std::map<Scheduler::Id, Tokens>& answers) {
  auto events = engine.step();
  ASSERT_TRUE(events.ok()) << events.status().message();
  for (const TokenEvent& event : *events) answers[event.id].push_back(event.token);
}

// Request i starts when i steps have been done.
std::vector<Tokens> staggered(Engine& engine, size_t count) {
  std::vector<Scheduler::Id> ids;
  std::map<Scheduler::Id, Tokens> answers;
  for (size_t i = 0; i < count; ++i) {
    ids.push_back(engine.submit(request(engine, i)).value());
    step(engine, answers);
  }
  while (!engine.idle() && !::testing::Test::HasFatalFailure()) step(engine, answers);
  std::vector<Tokens> in_order;
  for (Scheduler::Id id : ids) in_order.push_back(answers[id]);
  return in_order;
}

std::vector<Tokens> one_at_a_time(Engine& engine, size_t count) {
  std::vector<Tokens> answers;
  for (size_t i = 0; i < count; ++i) {
    std::map<Scheduler::Id, Tokens> answer;
    const Scheduler::Id id = engine.submit(request(engine, i)).value();
    while (!engine.idle() && !::testing::Test::HasFatalFailure()) step(engine, answer);
    answers.push_back(answer[id]);
  }
  return answers;
}

class ConcurrentStreams : public ::testing::TestWithParam<std::string> {};

TEST_P(ConcurrentStreams, GetWhatEachGetsAlone) {
  constexpr size_t kMost = 32;
  const std::vector<Tokens> alone = one_at_a_time(*load(GetParam(), 1), kMost);
  for (size_t i = 0; i < kMost; ++i) {
    ASSERT_EQ(static_cast<int64_t>(alone[i].size()), 8 + static_cast<int64_t>(i * 5 % 17));
  }
  for (size_t count : {size_t{8}, kMost}) {
    const std::vector<Tokens> wanted(alone.begin(), alone.begin() + static_cast<int64_t>(count));
    for (bool graphs : {true, false}) {
      if (!graphs && GetParam() != "cuda") continue;
      auto engine = load(GetParam(), static_cast<int64_t>(count), graphs);
      for (int run = 0; run < 5; ++run) {
        EXPECT_EQ(staggered(*engine, count), wanted)
            << count << " streams, run " << run << (graphs ? "" : ", without recorded steps");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ConcurrentStreams, ::testing::ValuesIn(with_gpu({"cpu"})),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace nibble
