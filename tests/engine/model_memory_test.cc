// What does not fit in memory: refused before it is loaded, or used out of its files.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/model_source.h"
#include "model/loaded_model.h"
#include "ops/backend.h"
#include "places.h"

namespace nibble {
namespace {

DecoderOptions small() {
  return {.kv = {.max_sequences = 1, .max_tokens = 64, .max_new_tokens = 32},
          .max_rows = 32,
          .max_logit_rows = 32};
}

Result<LoadedModel> load(const std::string& path, std::unique_ptr<Ops> ops, const DecoderOptions& options) {
  const auto source = ModelSource::open(FileSystem::posix(), path).value();
  ModelSpec spec = source->spec().value();
  auto weights = source->weights(spec, formats_copied(*ops)).value();
  return load_model(std::move(weights), std::move(spec), std::move(ops), options);
}

std::vector<float> logits(LoadedModel& model) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 20; ++i) ids.push_back(7 * i + 3);
  const SequenceStep step{
      .slot = model.decoder->kv().add_sequence().value(), .ids = ids, .logits = WantLogits::kAll};
  const Rows<const float> rows = model.decoder->forward({&step, 1}).value();
  return {rows.data, rows.data + rows.rows * rows.cols};
}

// Stacked experts (gpt-oss) are split in memory of the source's own, which must then stay, too.
TEST(ModelMemory, WeightsOutOfTheirFilesGiveTheSameModel) {
  for (const char* name : {"laguna-nvfp4", "laguna-ct", "gpt_oss-mxfp4"}) {
    LoadedModel tiles = load(golden_directory(name), make_backend("cpu", {}).value(), small()).value();
    auto ops = make_backend("cpu", {}).value();
    ASSERT_TRUE(ops->use_host_weights());
    LoadedModel files = load(golden_directory(name), std::move(ops), small()).value();
    const std::vector<float> wanted = logits(tiles), found = logits(files);
    ASSERT_EQ(found.size(), wanted.size());
    double error = 0, largest = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      error = std::max(error, std::fabs(static_cast<double>(found[i]) - wanted[i]));
      largest = std::max(largest, std::fabs(static_cast<double>(wanted[i])));
    }
    EXPECT_LE(error, 4e-5 * largest) << name;  // twice what golden_test.cc holds each of them to
    EXPECT_GT(error, 0) << name << ": both in tiles?";
  }
}

TEST(ModelMemory, ThePlanCountsWeightsInTheBackendsOrder) {
  EXPECT_EQ(fit_of({.working = 300, .copies = 700, .most = 1000}), MemoryFit::kAll);
  EXPECT_EQ(fit_of({.working = 300, .copies = 701, .most = 1000}), MemoryFit::kNotWeights);
  EXPECT_EQ(fit_of({.working = 1000, .copies = 0, .most = 1000}), MemoryFit::kAll);
  EXPECT_EQ(fit_of({.working = 1001, .copies = 0, .most = 1000}), MemoryFit::kNothing);
  EXPECT_EQ(fit_of({.working = 1, .copies = INT64_MAX, .most = 1000}), MemoryFit::kNotWeights);
}

// Says that one of its weights is larger than any memory.
class Large : public Checkpoint {
 public:
  Large(Checkpoint checkpoint, bool is_mapped, MatrixFormat format)
      : Checkpoint(std::move(checkpoint)), is_mapped_(is_mapped), format_(format) {}
  std::vector<StoredTensor> stored() const override {
    std::vector<StoredTensor> all = Checkpoint::stored();
    all.push_back({.name = "large",
                   .dtype = "U8",
                   .format = matrix_format_name(format_),
                   .matrix = format_,
                   .shape = {},
                   .bytes = INT64_C(1) << 60});
    return all;
  }
  bool is_mapped() const override { return is_mapped_; }

 private:
  bool is_mapped_;
  MatrixFormat format_;
};

Result<LoadedModel> load_large(bool is_mapped, MatrixFormat format = MatrixFormat::kNvfp4,
                               const std::string& ignored_prefix = "none") {
  const std::string path = golden_directory("laguna-nvfp4");
  ModelSpec spec = ModelSource::open(FileSystem::posix(), path).value()->spec().value();
  spec.names.ignored_prefixes.push_back(ignored_prefix);
  Checkpoint checkpoint = Checkpoint::open(FileSystem::posix(), path).value();
  return load_model(std::make_unique<Large>(std::move(checkpoint), is_mapped, format), std::move(spec),
                    make_backend("cpu", {}).value(), small());
}

TEST(ModelMemory, AModelBeyondMemoryRunsOutOfItsFiles) {
  using enum MatrixFormat;
  for (const MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kGgufQ4_0, kBF16}) {
    if (!make_backend("cpu", {}).value()->copies_weights(format)) continue;  // BF16: AVX-512 alone
    LoadedModel model = load_large(true, format).value();
    EXPECT_FALSE(model.ops->copies_weights(MatrixFormat::kNvfp4)) << matrix_format_name(format);
    EXPECT_FALSE(logits(model).empty());
  }
}

TEST(ModelMemory, WeightsThatNobodyReadsOrCopiesDoNotCount) {
  EXPECT_TRUE(load_large(true, MatrixFormat::kF16).value().ops->copies_weights(MatrixFormat::kNvfp4));
  EXPECT_TRUE(
      load_large(true, MatrixFormat::kNvfp4, "larg").value().ops->copies_weights(MatrixFormat::kNvfp4));
}

TEST(ModelMemory, StackedExpertsAreCopiedOutOfTheirFiles) {
  const Checkpoint stacked = Checkpoint::open(FileSystem::posix(), golden_directory("gpt_oss-mxfp4")).value();
  EXPECT_FALSE(stacked.is_mapped());
  int64_t gate_up = 0;  // split; down is used as it lies
  for (const TensorInfo* tensor : stacked.tensors()) {
    if (tensor->name.ends_with("gate_up_proj_blocks") || tensor->name.ends_with("gate_up_proj_scales"))
      gate_up += tensor->bytes;
  }
  EXPECT_GT(gate_up, 0);
  EXPECT_EQ(stacked.own_bytes(), gate_up);
  const Checkpoint plain = Checkpoint::open(FileSystem::posix(), golden_directory("laguna-nvfp4")).value();
  EXPECT_TRUE(plain.is_mapped());
}

TEST(ModelMemory, AModelBeyondMemoryThatHasNoFilesIsRefused) {
  const Result<LoadedModel> model = load_large(false);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), ErrorCode::kUser);
  EXPECT_NE(model.status().message().find("of memory for weights and "), std::string::npos)
      << model.status().message();
}

TEST(ModelMemory, AnImpossibleCacheIsRefusedBeforeWeightsAreRead) {
  DecoderOptions options = small();
  options.kv.max_sequences = 1024;
  options.kv.max_tokens = 1 << 20;
  const auto source = ModelSource::open(FileSystem::posix(), golden_directory("laguna-nvfp4")).value();
  ModelSpec spec = source->spec().value();
  auto ops = make_backend("cpu", {}).value();
  auto weights = source->weights(spec, formats_copied(*ops)).value();
  bool read = false;
  const Result<LoadedModel> model = load_model(std::move(weights), std::move(spec), std::move(ops), options,
                                               [&](int64_t, int64_t) { read = true; });
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), ErrorCode::kUser);
  EXPECT_TRUE(model.status().message().starts_with("KV cache and activations: wanted "))
      << model.status().message();
  EXPECT_FALSE(read);
}

}  // namespace
}  // namespace nibble
