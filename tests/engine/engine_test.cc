// The engine on the demo model.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <map>

#include "base/faulty_file.h"
#include "checkpoint/safetensors.h"
#include "golden_file.h"
#include "places.h"

namespace nibble {
namespace {

std::unique_ptr<Engine> load(int64_t parallel = 1, int64_t context = 256, int64_t chunk = 32) {
  auto engine = Engine::load(
      FileSystem::posix(),
      {.model = demo_directory(), .context = context, .parallel = parallel, .prefill_chunk = chunk});
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(engine).value();
}

struct Answer {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kNone;
};

// Steps until nothing is left.
std::map<Scheduler::Id, Answer> finish_all(Engine& engine) {
  std::map<Scheduler::Id, Answer> answers;
  while (!engine.idle()) {
    auto events = engine.step();
    EXPECT_TRUE(events.ok()) << events.status().message();
    if (!events.ok()) break;
    for (const TokenEvent& event : *events) {
      answers[event.id].tokens.push_back(event.token);
      answers[event.id].finish = event.finish;
    }
    engine.decoder().kv().check_integrity();
  }
  return answers;
}

Request request(Engine& engine, const std::string& prompt, uint64_t seed, int64_t max_tokens = 24) {
  Request r;
  r.prompt = engine.tokenizer().encode(prompt).value();
  r.sampling.seed = seed;
  r.max_tokens = max_tokens;
  return r;
}

TEST(Engine, GreedyTextOfTheDemoModel) {
  GoldenFile golden(golden_directory("demo") + "/golden.safetensors");
  auto engine = load();
  Request r;
  r.prompt = golden.get<int32_t>("prompt.0");
  EXPECT_EQ(engine->tokenizer().encode("Once upon a time there was a little").value(), r.prompt);
  r.sampling.temperature = 0;
  r.max_tokens = 48;
  auto greedy = golden.get<int32_t>("greedy.0");
  ASSERT_TRUE(engine->submit(r).ok());
  Answer answer = finish_all(*engine).begin()->second;
  auto end = std::find_if(greedy.begin(), greedy.end(), [&](int32_t id) { return engine->is_end(id); });
  if (end != greedy.end()) ++end;
  EXPECT_EQ(answer.tokens, std::vector<int32_t>(greedy.begin(), end));
}

// Promise 3: the same answer, whatever else runs.
TEST(Engine, EightRequestsTogetherGetWhatEachGetsAlone) {
  const std::vector<std::string> prompts = {"Once upon a time",
                                            "The old king looked at his daughter and said,",
                                            "A",
                                            "It was a dark night in the forest, and",
                                            "<|user|>Tell me a story about a fox.<|end|><|assistant|>",
                                            "\"Where are you going?\" asked the",
                                            "There were three brothers who lived at the edge of the great "
                                            "wood, and the youngest of them was thought a fool",
                                            "In the morning"};
  // Some need every logit, others the largest alone (Sampler::needs_top_only), in the same steps; to some all
  // of the largest are nearly equal.
  auto nth = [&](Engine& engine, size_t i) {
    Request r = request(engine, prompts[i], i, 16 + static_cast<int64_t>(i));
    if (i % 3 == 1) r.sampling.top_k = 0;
    if (i % 3 == 2) r.sampling = {.temperature = 100, .top_k = kTopLogits, .top_p = 1, .min_p = 0, .seed = i};
    return r;
  };
  std::vector<Answer> alone;
  auto single = load();
  for (size_t i = 0; i < prompts.size(); ++i) {
    ASSERT_TRUE(single->submit(nth(*single, i)).ok());
    alone.push_back(finish_all(*single).begin()->second);
  }
  for (int64_t chunk : {5, 64}) {
    auto engine = load(3, 256, chunk);  // three at a time, the others wait
    std::map<Scheduler::Id, size_t> which;
    std::map<Scheduler::Id, Answer> answers;
    for (size_t i = 0; i < prompts.size(); ++i) {
      which[engine->submit(nth(*engine, i)).value()] = i;
      auto events = engine->step();  // staggered starts
      ASSERT_TRUE(events.ok());
      for (const TokenEvent& e : *events) {
        answers[e.id].tokens.push_back(e.token);
        answers[e.id].finish = e.finish;
      }
    }
    for (auto& [id, answer] : finish_all(*engine)) {
      auto& tokens = answers[id].tokens;
      tokens.insert(tokens.end(), answer.tokens.begin(), answer.tokens.end());
      answers[id].finish = answer.finish;
    }
    ASSERT_EQ(answers.size(), prompts.size());
    for (auto& [id, answer] : answers) {
      EXPECT_EQ(answer.tokens, alone[which[id]].tokens) << "prompt " << which[id] << ", chunk " << chunk;
      EXPECT_EQ(answer.finish, alone[which[id]].finish);
    }
  }
}

TEST(Engine, SameSeedSameTextAnotherSeedAnother) {
  auto engine = load();
  std::vector<std::vector<int32_t>> texts;
  for (uint64_t seed : {7, 7, 8}) {
    ASSERT_TRUE(engine->submit(request(*engine, "Once upon a time", seed)).ok());
    texts.push_back(finish_all(*engine).begin()->second.tokens);
  }
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_NE(texts[0], texts[2]);
}

TEST(Engine, WhyAnAnswerEnds) {
  auto engine = load(1, 32);
  ASSERT_TRUE(engine->submit(request(*engine, "Once upon a time", 1, 5)).ok());
  Answer answer = finish_all(*engine).begin()->second;
  EXPECT_EQ(answer.tokens.size(), 5u);
  EXPECT_EQ(answer.finish, FinishReason::kLength);

  Request full = request(*engine, "Once upon a time", 1);
  full.max_tokens.reset();
  full.ignore_eos = true;
  const size_t prompt = full.prompt.size();
  ASSERT_TRUE(engine->submit(full).ok());
  answer = finish_all(*engine).begin()->second;
  EXPECT_EQ(answer.finish, FinishReason::kContext);
  EXPECT_EQ(prompt + answer.tokens.size(), 32u);
}

// An end token of generation_config.json: the comma, which the greedy story of the golden file has early on.
TEST(Engine, EndsAtAnEndToken) {
  auto plain = load(1, 128);
  const int32_t comma = plain->tokenizer().encode(",").value().at(0);
  FaultyFileSystem files(&FileSystem::posix());
  files.add_file(demo_directory() + "/generation_config.json",
                 "{\"eos_token_id\": " + std::to_string(comma) + "}");
  auto engine = Engine::load(files, {.model = demo_directory(), .context = 128});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  EXPECT_TRUE((*engine)->is_end(comma));
  EXPECT_TRUE((*engine)->is_end(0));  // and what config.json names
  Request r = request(**engine, "The old king looked at his daughter and said", 1, 100);
  r.sampling.temperature = 0;
  ASSERT_TRUE((*engine)->submit(r).ok());
  Answer answer = finish_all(**engine).begin()->second;
  EXPECT_EQ(answer.finish, FinishReason::kStop);
  EXPECT_EQ(answer.tokens.back(), comma);
  EXPECT_LT(answer.tokens.size(), 100u);
  r.ignore_eos = true;
  ASSERT_TRUE((*engine)->submit(r).ok());
  answer = finish_all(**engine).begin()->second;
  EXPECT_EQ(answer.finish, FinishReason::kLength);
  EXPECT_EQ(answer.tokens.size(), 100u);
}

// A weight that is NaN is found by the first logits, not answered with silence.
TEST(Engine, LogitsThatAreNoNumbersAreAnError) {
  auto bytes = read_text(FileSystem::posix(), demo_directory() + "/model.safetensors", int64_t{64} << 20);
  ASSERT_TRUE(bytes.ok());
  auto file = memory_file("model.safetensors", *bytes);
  auto header = read_safetensors_header(*file);
  ASSERT_TRUE(header.ok());
  for (const TensorInfo& tensor : header->tensors) {
    if (tensor.name != "model.layers.3.self_attn.q_proj.weight") continue;
    (*bytes)[static_cast<size_t>(tensor.begin)] = '\xC0';  // a bfloat16 NaN
    (*bytes)[static_cast<size_t>(tensor.begin) + 1] = '\x7F';
  }
  FaultyFileSystem files(&FileSystem::posix());
  files.add_file(demo_directory() + "/model.safetensors", *bytes);
  for (int32_t top_k : {40, 0}) {  // from the largest logits alone, and from all
    auto engine = Engine::load(files, {.model = demo_directory(), .context = 64});
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    Request r = request(**engine, "Once upon a time", 1, 4);
    r.sampling.top_k = top_k;
    ASSERT_TRUE((*engine)->submit(r).ok());
    auto events = (*engine)->step();
    ASSERT_FALSE(events.ok());
    EXPECT_NE(events.status().message().find("NaN"), std::string::npos);
  }
}

TEST(Engine, BadRequestsAreErrorsAtOnce) {
  auto engine = load(1, 32);
  auto message = [&](Request r) { return engine->submit(std::move(r)).status().message(); };
  Request good = request(*engine, "Once", 1);
  Request r = good;
  r.prompt.clear();
  EXPECT_NE(message(r).find("empty"), std::string::npos);
  r.prompt.assign(32, 5);
  EXPECT_NE(message(r).find("32 tokens"), std::string::npos);
  r.prompt = {8192};
  EXPECT_NE(message(r).find("8192"), std::string::npos);
  r.prompt = {-1};
  EXPECT_NE(message(r).find("-1"), std::string::npos);
  r = good;
  r.sampling.top_p = 2;
  EXPECT_NE(message(r).find("top_p"), std::string::npos);
  r = good;
  r.max_tokens = 0;
  EXPECT_NE(message(r).find("max_tokens"), std::string::npos);
  EXPECT_TRUE(engine->idle());
}

TEST(Engine, CancelFreesTheSlotInEveryState) {
  auto engine = load(1, 64, 4);
  auto running = engine->submit(request(*engine, "Once upon a time there was a little boy who", 1)).value();
  auto waiting = engine->submit(request(*engine, "Once", 1)).value();
  ASSERT_TRUE(engine->step().ok());  // `running` is in its prompt
  engine->cancel(running);
  engine->cancel(12345);
  ASSERT_TRUE(engine->step().ok());
  engine->cancel(waiting);
  EXPECT_TRUE(engine->idle());
  engine->decoder().kv().check_integrity();
  EXPECT_EQ(engine->decoder().kv().free_tokens(), 64);
  ASSERT_TRUE(engine->submit(request(*engine, "Once", 1, 3)).ok());
  EXPECT_EQ(finish_all(*engine).begin()->second.tokens.size(), 3u);
}

TEST(Engine, WhatCannotLoadSaysWhy) {
  auto message = [](EngineOptions options) {
    return Engine::load(FileSystem::posix(), options).status().message();
  };
  EXPECT_NE(message({.model = "/no/such"}).find("/no/such"), std::string::npos);
  EXPECT_NE(message({.model = demo_directory(), .device = "abacus"}).find("abacus"), std::string::npos);
  EXPECT_NE(message({.model = demo_directory(), .parallel = 0}).find("parallel"), std::string::npos);
  EXPECT_NE(message({.model = demo_directory(), .chat_template = "/no/such.jinja"}).find("/no/such.jinja"),
            std::string::npos);
}

}  // namespace
}  // namespace nibble
