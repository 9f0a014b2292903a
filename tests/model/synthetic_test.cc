// Models without files: their shapes, that their bytes are always the same, and that they compute.
#include <array>
#include <cmath>
#include <cstdlib>
#include <tuple>

#include "model/synthetic_model.h"
#include "model/synthetic_tensors.h"
#include "model/synthetic_weights.h"
#include "test_model.h"

namespace nibble {
namespace {

enum class Bytes { kShared, kDistinct };

FormatsCopied copied(Bytes bytes) {
  return [bytes](MatrixFormat) { return bytes == Bytes::kShared; };
}

// The model with a small vocabulary: most of the memory of a few layers is in embedding and head.
ModelSpec small_spec(const std::string& model) {
  auto spec = synthetic_spec(model);
  EXPECT_TRUE(spec.ok()) << spec.status().message();
  spec->vocab = 500;
  return *spec;
}

std::unique_ptr<SyntheticWeights> weights_of(const ModelSpec& spec, Bytes bytes) {
  auto weights = SyntheticWeights::make(spec, "synthetic:test", copied(bytes));
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  return std::move(weights).value();
}

std::string bytes_of(const Matrix& m) {
  std::string all(static_cast<const char*>(m.codes),
                  static_cast<size_t>(matrix_code_bytes(m.format, m.n, m.k)));
  if (m.scales != nullptr)
    all.append(static_cast<const char*>(m.scales),
               static_cast<size_t>(matrix_scale_bytes(m.format, m.n, m.k)));
  return all;
}

TEST(Synthetic, HasTheShapesOfTheReleasedModels) {
  // Bytes of matrices, in 100 MB: Laguna-S-2.1's NVFP4 release has 71.9 GB, GLM-5.3-Flash's 16.6 GiB of BF16
  // and 42 layers of 288 experts of 13.5 MiB; XS.2 counted from the table of spec/models.md.
  struct Case {
    const char* model;
    size_t layers;
    int64_t experts, bytes;
  };
  for (const Case& c :
       {Case{"synthetic:laguna-s-2.1", 48, 256, 719}, Case{"synthetic:laguna-xs.2", 40, 256, 217},
        Case{"synthetic:glm-5.3-flash", 45, 288, 1890}}) {
    const ModelSpec spec = synthetic_spec(c.model).value();
    EXPECT_EQ(spec.layers.size(), c.layers);
    EXPECT_EQ(spec.layers.back().moe->experts, c.experts);
    EXPECT_FALSE(spec.layers.front().moe.has_value());
    int64_t bytes = 0;
    for (const SyntheticTensor& t : synthetic_tensors(spec)) {
      if (t.format != MatrixFormat::kF32) bytes += matrix_bytes(t.format, t.shape[0], t.shape[1]);
    }
    EXPECT_EQ((bytes + 50'000'000) / 100'000'000, c.bytes) << c.model << ": " << bytes;
  }
}

TEST(Synthetic, TakesTheFirstLayersAndFewerExperts) {
  const ModelSpec spec = synthetic_spec("synthetic:laguna-s-2.1:layers=6:experts=16").value();
  ASSERT_EQ(spec.layers.size(), 6u);
  EXPECT_EQ(spec.layers[5].moe->experts, 16);
  for (size_t i = 0; i < 6; ++i) {
    const auto& gqa = std::get<GqaSpec>(spec.layers[i].mixer);
    EXPECT_EQ(gqa.window, i % 4 == 0 ? 0 : 512);
    EXPECT_EQ(gqa.heads, i % 4 == 0 ? 48 : 72);
    EXPECT_EQ(spec.layers[i].moe.has_value(), i > 0);
  }
  const ModelSpec glm = synthetic_spec("synthetic:glm-5.3-flash:layers=4").value();
  ASSERT_EQ(glm.layers.size(), 4u);
  EXPECT_TRUE(std::holds_alternative<KdaSpec>(glm.layers[2].mixer));
  EXPECT_TRUE(std::holds_alternative<MlaSpec>(glm.layers[3].mixer));
  EXPECT_FALSE(glm.layers[2].moe.has_value());
  EXPECT_EQ(glm.layers[3].moe->experts, 288);
}

TEST(Synthetic, RefusesOthersByName) {
  const std::string options =
      "wanted layers=N of 1 to 40, experts=N of 8 to 256, or format=nvfp4, q4 or bf16";
  for (const auto& [model, wanted] : std::vector<std::pair<std::string, std::string>>{
           {"synthetic:", "synthetic:laguna-xs.2, synthetic:glm-5.3-flash"},
           {"synthetic:gpt-oss", "synthetic:laguna-s-2.1"},
           {"synthetic:laguna-xs.2:", "'': " + options},
           {"synthetic:laguna-xs.2:layers=0", "'layers=0': " + options},
           {"synthetic:laguna-xs.2:layers=41", options},
           {"synthetic:laguna-xs.2:layers=4x", options},
           {"synthetic:laguna-xs.2:layers", options},
           {"synthetic:laguna-xs.2:experts=7", options},
           {"synthetic:laguna-xs.2:experts=257", options},
           {"synthetic:laguna-xs.2:layers=99999999999999999999", options},
           {"synthetic:laguna-xs.2:format=q5", options},
           {"synthetic:laguna-xs.2:heads=4", options}}) {
    const Status status = synthetic_spec(model).status();
    EXPECT_EQ(status.code(), ErrorCode::kUser) << model;
    EXPECT_NE(status.message().find(wanted), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("'" + model + "'"), std::string::npos) << status.message();
  }
}

TEST(Synthetic, ANameAlwaysHasTheSameBytes) {
  const ModelSpec spec = small_spec("synthetic:laguna-xs.2:layers=2:experts=8");
  const std::string layer = "model.layers.1.", expert = layer + "mlp.experts.3.up_proj",
                    other_expert = layer + "mlp.experts.4.up_proj", query = layer + "self_attn.q_proj";
  const auto shared = weights_of(spec, Bytes::kShared), again = weights_of(spec, Bytes::kShared),
             distinct = weights_of(spec, Bytes::kDistinct);
  EXPECT_TRUE(again->has(query) && !again->has(query + "s"));
  auto take = [&](SyntheticWeights& weights, const std::string& name, int64_t n, int64_t k) {
    return weights.matrix(name, n, k).value();
  };
  const std::vector<std::tuple<std::string, int64_t, int64_t, MatrixFormat>> matrices = {
      {expert, 512, 2048, MatrixFormat::kNvfp4},
      {other_expert, 512, 2048, MatrixFormat::kNvfp4},
      {query, 64 * 128, 2048, MatrixFormat::kBF16},
      {"model.embed_tokens", 500, 2048, MatrixFormat::kBF16},
      {"lm_head", 500, 2048, MatrixFormat::kBF16}};
  std::vector<std::string> seen;
  for (const auto& [name, n, k, format] : matrices) {
    const Matrix a = take(*shared, name, n, k), b = take(*distinct, name, n, k);
    EXPECT_EQ(a.format, format) << name;
    EXPECT_EQ(a.tensor_scale, b.tensor_scale) << name;
    const std::string bytes = bytes_of(a);
    EXPECT_TRUE(bytes == bytes_of(take(*again, name, n, k))) << name;
    EXPECT_TRUE(bytes == bytes_of(b)) << name;
    EXPECT_EQ(std::count(seen.begin(), seen.end(), bytes), 0) << name;
    seen.push_back(bytes);
  }
  // Distinct ones lie apart; what is shared costs no memory of its own.
  const Matrix a = take(*distinct, expert, 512, 2048), b = take(*distinct, other_expert, 512, 2048);
  const auto* a_begin = static_cast<const std::byte*>(a.codes);
  const auto* b_begin = static_cast<const std::byte*>(b.codes);
  EXPECT_GE(std::abs(a_begin - b_begin), matrix_bytes(a.format, a.n, a.k));

  // A format that somebody copies is shared, beside others that are not.
  const auto mixed = SyntheticWeights::make(spec, "synthetic:test", [](MatrixFormat format) {
                       return format == MatrixFormat::kNvfp4;
                     }).value();
  EXPECT_TRUE(bytes_of(take(*mixed, expert, 512, 2048)) == bytes_of(a));
  const auto begin_of = [&](const std::string& name, int64_t n) {
    return static_cast<const std::byte*>(take(*mixed, name, n, 2048).codes);
  };
  EXPECT_EQ(begin_of(expert, 512), begin_of(expert, 512));
  EXPECT_NE(begin_of(query, 64 * 128), begin_of(query, 64 * 128));

  auto floats = [&](SyntheticWeights& weights, const char* name) {
    return weights.floats(layer + name, std::array<int64_t, 1>{2048}).value();
  };
  const std::vector<float> norm = floats(*shared, "input_layernorm.weight");
  EXPECT_EQ(norm, floats(*distinct, "input_layernorm.weight"));
  EXPECT_NE(norm, floats(*shared, "post_attention_layernorm.weight"));
}

TEST(Synthetic, ExpertsInQ4GiveOutputsOfUnitVariance) {
  const std::string model = "synthetic:laguna-xs.2:layers=2:experts=8:format=q4";
  const auto weights = SyntheticWeights::make(small_spec(model), model, copied(Bytes::kShared)).value();
  const Matrix m = weights->matrix("model.layers.1.mlp.experts.3.up_proj", 512, 2048).value();
  EXPECT_EQ(m.format, MatrixFormat::kQ4);
  EXPECT_EQ(synthetic_format(model + ":format=bf16"), MatrixFormat::kBF16);  // the last one
  std::vector<float> row(2048);
  double squares = 0;
  for (int64_t n = 0; n < 64; ++n) {
    dequantize_row(m, n, row.data());
    for (float value : row) squares += double{value} * value / 64;
  }
  EXPECT_NEAR(squares, 1, 0.02);
  for (const StoredTensor& t : weights->stored()) {
    const int64_t each = t.dtype == "F16" ? 2 : 1;
    if (t.matrix != m.format) continue;
    EXPECT_EQ(t.bytes, t.shape[0] * t.shape[1] * each) << t.name;
  }
}

TEST(Synthetic, WhatDoesNotFitIsRefusedBeforeItIsMade) {
  ModelSpec spec = synthetic_spec("synthetic:glm-5.3-flash").value();
  spec.vocab = int64_t{1} << 32;  // 64 TiB
  const Status status = SyntheticWeights::make(spec, "synthetic:test", copied(Bytes::kDistinct)).status();
  EXPECT_EQ(status.code(), ErrorCode::kUser);
  EXPECT_NE(status.message().find("synthetic:test: wanted 64.1"), std::string::npos) << status.message();
}

double rms(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return std::sqrt(sum / static_cast<double>(n));
}

class SyntheticSlow : public ::testing::TestWithParam<const char*> {};

// All that the loader asks for is there, nothing is over, and the backends agree: a factor or a scale that
// one of them passes over would show.
TEST_P(SyntheticSlow, ComputesTheSameOnCpuAndReference) {
  const ModelSpec spec = small_spec(GetParam());
  const std::vector<int32_t> ids = {5, 17, 5, 499};
  std::vector<std::vector<float>> logits;
  for (const char* backend : {"cpu", "reference"}) {
    auto source = weights_of(spec, logits.empty() ? Bytes::kDistinct : Bytes::kShared);
    TestModel model = load_test_model(std::move(source), spec, backend, options_for(4));
    logits.push_back(model.logits(ids, 4));
  }
  const int64_t vocab = spec.vocab;
  for (int64_t t = 0; t < std::ssize(ids); ++t) {
    const float *cpu = logits[0].data() + t * vocab, *reference = logits[1].data() + t * vocab;
    float largest = 0, error = 0;
    for (int64_t i = 0; i < vocab; ++i) {
      ASSERT_TRUE(std::isfinite(cpu[i]));
      largest = std::max(largest, std::abs(reference[i]));
      error = std::max(error, std::abs(cpu[i] - reference[i]));
    }
    EXPECT_LT(error, 2e-5f * largest) << "row " << t;
    // A norm and a head with outputs of unit variance.
    EXPECT_NEAR(rms(reference, vocab), 1, 0.2) << "row " << t;
  }
  EXPECT_NE(logits[0][0], logits[0][static_cast<size_t>(vocab)]);
}
INSTANTIATE_TEST_SUITE_P(Models, SyntheticSlow,
                         ::testing::Values("synthetic:laguna-s-2.1:layers=2:experts=16",
                                           "synthetic:laguna-xs.2:layers=2:experts=16",
                                           "synthetic:glm-5.3-flash:layers=4:experts=16"));

// Through many layers the residual stream neither dies nor grows beyond what its layers add to it.
TEST(SyntheticDepthSlow, ActivationsKeepTheirSize) {
  const ModelSpec spec = small_spec("synthetic:laguna-xs.2:experts=8");
  TestModel model = load_test_model(weights_of(spec, Bytes::kShared), spec, "cpu", options_for(2));
  std::vector<double> sizes;
  const Trace trace{
      .hidden = [&](size_t /*layer*/, Rows<const float> x) { sizes.push_back(rms(x.row(1), x.cols)); },
      .experts = {}};
  const std::vector<int32_t> ids = {3, 8};
  const SequenceStep step{model.add_sequence(), ids, WantLogits::kLast};
  ASSERT_TRUE(model.decoder->forward(std::span(&step, 1), &trace).ok());
  ASSERT_EQ(sizes.size(), 41u);
  for (size_t i = 1; i < sizes.size(); ++i) {
    EXPECT_GT(sizes[i], 0.1) << "layer " << i;
    EXPECT_LT(sizes[i], 10) << "layer " << i;
  }
}

}  // namespace
}  // namespace nibble
