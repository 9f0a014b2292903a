// What a bench counts; what it times is not for a test.
#include "engine/throughput.h"

#include <gtest/gtest.h>

#include "engine/model_source.h"
#include "model/loaded_model.h"
#include "ops/backend.h"
#include "places.h"

namespace nibble {
namespace {

LoadedModel load(const std::vector<Workload>& workloads) {
  const auto source = ModelSource::open(FileSystem::posix(), golden_directory("laguna-nvfp4")).value();
  ModelSpec spec = source->spec().value();
  auto ops = make_backend("cpu", {.threads = 1}).value();
  auto weights = source->weights(spec, formats_copied(*ops)).value();
  return load_model(std::move(weights), std::move(spec), std::move(ops), options_for(workloads)).value();
}

TEST(Throughput, OneSequenceReadsWhatATokenReads) {
  const Workload decode{.name = "tg7", .tokens = 7, .decodes = true};
  const LoadedModel model = load({decode});
  std::vector<std::pair<int64_t, int64_t>> reports;
  const Throughput found = measure(*model.decoder, decode, 2, [&](int64_t done, int64_t total) {
                             reports.emplace_back(done, total);
                           }).value();
  // The last of all steps is the last.
  ASSERT_FALSE(reports.empty());
  for (size_t i = 0; i < reports.size(); ++i)
    EXPECT_EQ(reports[i], std::pair(static_cast<int64_t>(i) + 1, std::ssize(reports)));
  EXPECT_EQ(found.seconds.size(), 2u);
  EXPECT_GT(found.seconds[0], 0);
  EXPECT_LE(found.seconds[0], found.seconds[1]);
  EXPECT_EQ(found.weight_bytes, 7 * weight_bytes_per_token(model.decoder->spec(), model.decoder->weights()));
  EXPECT_EQ(found.experts_a_layer, 4);  // those of one token
}

TEST(Throughput, SequencesShareWhatTheyRead) {
  const Workload decode{.name = "tg5", .sequences = 6, .tokens = 5, .decodes = true};
  const LoadedModel model = load({decode});
  const Throughput found = measure(*model.decoder, decode, 1).value();
  EXPECT_EQ(found.tokens(), 30);
  EXPECT_GT(found.experts_a_layer, 4);
  EXPECT_LE(found.experts_a_layer, 16);  // all of a layer
  const int64_t one = weight_bytes_per_token(model.decoder->spec(), model.decoder->weights());
  EXPECT_GT(found.weight_bytes, 5 * one);
  EXPECT_LT(found.weight_bytes, 30 * one);
  // A second time from the same state: every sequence was given back.
  EXPECT_EQ(measure(*model.decoder, decode, 1).value().weight_bytes, found.weight_bytes);
}

TEST(Throughput, APromptReadsTheHeadOnce) {
  const Workload chunks{.name = "pp23", .tokens = 23, .chunk = 10},
      whole{.name = "pp23", .tokens = 23, .chunk = 64};
  const LoadedModel model = load({chunks, whole});
  const Throughput in_chunks = measure(*model.decoder, chunks, 1).value(),
                   at_once = measure(*model.decoder, whole, 1).value();
  EXPECT_EQ(in_chunks.workload.steps(), 3);
  EXPECT_EQ(at_once.workload.steps(), 1);
  const ModelSpec& spec = model.decoder->spec();
  const Matrix& head = model.decoder->weights().head;
  const std::vector<int64_t> no_experts(spec.layers.size());
  const int64_t head_bytes = matrix_bytes(head.format, head.n, head.k),
                fixed = weight_bytes_of_step(spec, model.decoder->weights(), 0, no_experts, false),
                row = weight_bytes_of_step(spec, model.decoder->weights(), 1, no_experts, false) - fixed;
  const auto& experts = model.decoder->weights().layers[1].ffn.experts->experts();
  const int64_t expert = 3 * matrix_bytes(experts[0].gate.format, experts[0].gate.n, experts[0].gate.k);
  for (const Throughput& found : {in_chunks, at_once}) {
    const int64_t of_experts = found.weight_bytes - head_bytes - found.workload.steps() * fixed - 23 * row;
    const auto sparse = static_cast<double>(spec.layers.size() - 1);
    EXPECT_NEAR(static_cast<double>(of_experts) / static_cast<double>(expert),
                found.experts_a_layer * sparse * static_cast<double>(found.workload.steps()), 1e-6);
  }
}

}  // namespace
}  // namespace nibble
