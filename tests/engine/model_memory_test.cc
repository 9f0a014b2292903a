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
  int64_t own_bytes() const override { return own_bytes_; }
  int64_t own_bytes_ = 0;

 private:
  bool is_mapped_;
  MatrixFormat format_;
};

Result<LoadedModel> load_large(bool is_mapped, MatrixFormat format = MatrixFormat::kNvfp4,
                               const std::string& ignored_prefix = "none", int64_t own_bytes = 0) {
  const std::string path = golden_directory("laguna-nvfp4");
  ModelSpec spec = ModelSource::open(FileSystem::posix(), path).value()->spec().value();
  spec.names.ignored_prefixes.push_back(ignored_prefix);
  Checkpoint checkpoint = Checkpoint::open(FileSystem::posix(), path).value();
  auto large = std::make_unique<Large>(std::move(checkpoint), is_mapped, format);
  large->own_bytes_ = own_bytes;
  return load_model(std::move(large), std::move(spec), make_backend("cpu", {}).value(), small());
}

TEST(ModelMemory, AModelBeyondMemoryRunsOutOfItsFiles) {
  using enum MatrixFormat;
  for (const MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kGgufQ4_0, kBF16}) {
    if (!make_backend("cpu", {}).value()->copies_weights(format)) continue;  // BF16: AVX-512 alone
    LoadedModel model = load_large(true, format).value();
    EXPECT_FALSE(model.ops->copies_weights(kBF16)) << matrix_format_name(format);
    // Where BF16 is what is too large, it alone stays.
    EXPECT_EQ(model.ops->copies_weights(kNvfp4), format == kBF16) << matrix_format_name(format);
    EXPECT_FALSE(logits(model).empty());
  }
}

TEST(ModelMemory, AModelInTheSourcesOwnMemoryRunsThere) {
  EXPECT_FALSE(load_large(false).ok());
  LoadedModel model = load_large(false, MatrixFormat::kNvfp4, "none", 1000).value();
  EXPECT_FALSE(model.ops->copies_weights(MatrixFormat::kNvfp4));
  EXPECT_FALSE(logits(model).empty());
  EXPECT_FALSE(load_large(false, MatrixFormat::kNvfp4, "none", INT64_C(1) << 60).ok());
}

TEST(ModelMemory, WeightsThatNobodyReadsOrCopiesDoNotCount) {
  EXPECT_TRUE(load_large(true, MatrixFormat::kF16).value().ops->copies_weights(MatrixFormat::kNvfp4));
  EXPECT_TRUE(
      load_large(true, MatrixFormat::kNvfp4, "larg").value().ops->copies_weights(MatrixFormat::kNvfp4));
}

// A backend that computes nothing, says what its operations take, and has so much memory.
class Hungry final : public Ops {
 public:
  Hungry(int64_t working_bytes, int64_t most_bytes) : working_bytes_(working_bytes), memory_(most_bytes) {}
  std::string_view name() const override { return "hungry"; }
  std::string description() const override { return "hungry"; }
  Memory& memory() override { return memory_; }
  int64_t working_bytes(const StepShape&) const override { return working_bytes_; }
  Result<double> read_bandwidth() override { return internal_error("none"); }
  Result<Matrix> place(const Matrix&, MatrixUse) override { return user_error("a weight was placed"); }

 protected:
  static void never() { check_failed(__FILE__, __LINE__, "it computes nothing"); }
  void do_embed(std::span<const int32_t>, const Matrix&, Rows<float>) override { never(); }
  void do_gather(Rows<const float>, std::span<const int32_t>, Rows<float>) override { never(); }
  void do_rms_norm(Rows<const float>, const float*, float, Rows<float>) override { never(); }
  void do_linear(Rows<const float>, const Matrix&, Rows<float>) override { never(); }
  void do_rope_table(const int32_t*, std::span<const float>, float, Rows<float>) override { never(); }
  void do_rope(Rows<float>, int64_t, Rows<const float>, RopeStyle, int64_t) override { never(); }
  void do_write_kv(Rows<const float>, Rows<const float>, const RowsOfStep&, const KvView&) override {
    never();
  }
  void do_attend(const AttendArgs&) override { never(); }
  void do_gate_output(OutputGate, Rows<const float>, int64_t, Rows<float>) override { never(); }
  void do_activate(const ActivationSpec&, Rows<const float>, Rows<const float>, Rows<float>) override {
    never();
  }
  void do_add(Rows<const float>, Rows<float>) override { never(); }
  void do_add_bias(Rows<float>, const float*) override { never(); }
  void do_route(const RouteArgs&) override { never(); }

 private:
  class Limited final : public Memory {
   public:
    explicit Limited(int64_t most_bytes) : most_bytes_(most_bytes) {}
    Result<void*> allocate(int64_t bytes, const std::string& purpose) override {
      return host_memory().allocate(bytes, purpose);
    }
    int64_t most_bytes() const override { return most_bytes_; }
    void free(void* address) override { host_memory().free(address); }
    void upload(void* to, const void* from, int64_t bytes) override { host_memory().upload(to, from, bytes); }
    void download(void* to, const void* from, int64_t bytes) override {
      host_memory().download(to, from, bytes);
    }

   private:
    int64_t most_bytes_;
  };
  int64_t working_bytes_;
  Limited memory_;
};

TEST(ModelMemory, WhatOperationsTakeIsPlannedBeforeWeightsAreRead) {
  const std::string path = golden_directory("laguna-nvfp4");
  const ModelSpec spec = ModelSource::open(FileSystem::posix(), path).value()->spec().value();
  const int64_t without = Decoder::plan_bytes(spec, small()).value();
  constexpr int64_t kTakes = 1000;
  auto message = [&](int64_t most_bytes) {
    return load(path, std::make_unique<Hungry>(kTakes, most_bytes), small()).status().message();
  };
  // With enough it comes to the first weight.
  EXPECT_EQ(message(without + kTakes), "a weight was placed");
  for (int64_t most_bytes : {without + kTakes - 1, without, without - 1})
    EXPECT_TRUE(message(most_bytes).starts_with("KV cache and activations: wanted ")) << message(most_bytes);
  EXPECT_TRUE(load(path, std::make_unique<Hungry>(INT64_MAX, INT64_MAX - 1), small())
                  .status()
                  .message()
                  .starts_with("KV cache and activations: wanted "));
}

TEST(ModelMemory, OperationsArePlannedForTheLargestStep) {
  DecoderOptions options = small();
  options.kv.max_tokens = 50;
  options.max_logit_rows = 3;
  auto step_of = [&](const char* name) {
    return Decoder::largest_step(
        ModelSource::open(FileSystem::posix(), golden_directory(name)).value()->spec().value(), options);
  };
  const StepShape laguna = step_of("laguna-nvfp4"), glm = step_of("glm5_next-nvfp4");
  const ModelSpec spec =
      ModelSource::open(FileSystem::posix(), golden_directory("laguna-nvfp4")).value()->spec().value();
  EXPECT_EQ(laguna.rows, 32);
  EXPECT_EQ(laguna.logit_rows, 3);
  EXPECT_EQ(laguna.positions, 64);  // whole pages
  EXPECT_EQ(laguna.vocab, spec.vocab);
  EXPECT_EQ(laguna.attention.size(), spec.layers.size());
  const auto& gqa = std::get<GqaSpec>(spec.layers[0].mixer);
  EXPECT_EQ(laguna.attention[0].heads, gqa.heads);
  EXPECT_EQ(laguna.attention[0].head_dim, gqa.head_dim);
  EXPECT_EQ(laguna.attention[0].window, gqa.window);
  EXPECT_GE(laguna.widest, gqa.query_width());
  EXPECT_EQ(laguna.pool, 0);
  ASSERT_FALSE(laguna.experts.empty());
  EXPECT_EQ(laguna.experts.back().count, spec.layers.back().moe->experts);
  EXPECT_EQ(laguna.experts.back().width, spec.layers.back().moe->width);
  // Chosen positions, pools of them, and layers without attention.
  EXPECT_GT(glm.pool, 0);
  EXPECT_GT(glm.attention.size(), 0u);
  for (const StepShape::Attention& a : glm.attention) EXPECT_GT(a.value_dim, 0);
  EXPECT_GT(glm.attention.back().chosen, glm.pool);
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
