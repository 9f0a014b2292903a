#include "ops/backends.h"

namespace nibble::testing {
namespace {

struct Shape {
  int64_t experts, chosen, model, width, tokens;
};

// Experts, a step and its routing.
struct Layer {
  Shape shape;
  std::vector<TestMatrix> matrices;  // gate, up, down of each expert
  std::vector<ExpertWeights> experts;
  RowsBuffer x, weights;
  std::vector<int32_t> ids;
  ActivationSpec activation;
  std::vector<std::vector<float>> biases;

  Layer(Random& random, const Shape& shape_, MatrixFormat up_format, MatrixFormat down_format)
      : shape(shape_),
        x(RowsBuffer::random(random, shape.tokens, shape.model)),
        weights(RowsBuffer::random(random, shape.tokens, shape.chosen)) {
    matrices.reserve(static_cast<size_t>(shape.experts) * 3);
    for (int64_t e = 0; e < shape.experts; ++e) {
      const float tensor_scale = 0.01f * static_cast<float>(1 + e % 5);
      matrices.emplace_back(random, up_format, shape.width, shape.model, 4 * tensor_scale);
      matrices.emplace_back(random, up_format, shape.width, shape.model, tensor_scale);
      matrices.emplace_back(random, down_format, shape.model, shape.width, 0.02f);
      const size_t at = static_cast<size_t>(e) * 3;
      experts.push_back({matrices[at].matrix, matrices[at + 1].matrix, matrices[at + 2].matrix});
    }
    choose(random);
  }
  void choose(Random& random) {
    std::vector<int32_t> all(static_cast<size_t>(shape.experts));
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
    for (int64_t t = 0; t < shape.tokens; ++t) {
      std::shuffle(all.begin(), all.end(), random.engine());
      ids.insert(ids.end(), all.begin(), all.begin() + shape.chosen);
    }
  }
  // Gives expert e the biases that the bits of e say.
  void add_biases(Random& random) {
    for (size_t e = 0; e < experts.size(); ++e) {
      biases.push_back(random.floats(2 * shape.width + shape.model));
      const float* bias = biases.back().data();
      if ((e & 1) != 0) experts[e].gate_bias = bias;
      if ((e & 2) != 0) experts[e].up_bias = bias + shape.width;
      if ((e & 4) != 0) experts[e].down_bias = bias + 2 * shape.width;
    }
  }
};

struct Scratch {
  RowsBuffer gathered, gate, up, down;
  explicit Scratch(const Shape& s)
      : gathered(s.tokens * s.chosen, s.model),
        gate(s.tokens * s.chosen, s.width),
        up(s.tokens * s.chosen, s.width),
        down(s.tokens * s.chosen, s.model) {}
  ExpertScratch view() { return {gathered.view(), gate.view(), up.view(), down.view()}; }
};

RowsBuffer expert_ffn(OnHostData& ops, const Layer& layer, int64_t first = 0, int64_t count = -1) {
  if (count < 0) count = layer.shape.tokens;
  Scratch scratch(layer.shape);
  RowsBuffer out(count, layer.shape.model);
  Rows<const int32_t> ids(layer.ids.data(), layer.shape.tokens, layer.shape.chosen);
  const std::unique_ptr<PlacedExperts> placed = ops.place_experts(layer.experts);
  ops.expert_ffn({layer.x.read().slice(first, count), ids.slice(first, count),
                  layer.weights.read().slice(first, count), *placed, layer.activation, scratch.view(),
                  out.view()});
  return out;
}

// The sum of unfused operations, one (token, expert) pair after the other.
RowsBuffer unfused(OnHostData& ops, const Layer& layer) {
  const Shape& s = layer.shape;
  RowsBuffer out(s.tokens, s.model), gate(1, s.width), up(1, s.width), down(1, s.model);
  for (int64_t t = 0; t < s.tokens; ++t) {
    std::fill_n(out.view().row(t), s.model, 0.0f);
    for (int64_t a = 0; a < s.chosen; ++a) {
      const ExpertWeights& w =
          layer.experts[static_cast<size_t>(layer.ids[static_cast<size_t>(t * s.chosen + a)])];
      ops.linear(layer.x.read().slice(t, 1), w.gate, gate.view());
      ops.linear(layer.x.read().slice(t, 1), w.up, up.view());
      if (w.gate_bias != nullptr) ops.add_bias(gate.view(), w.gate_bias);
      if (w.up_bias != nullptr) ops.add_bias(up.view(), w.up_bias);
      ops.activate(layer.activation, gate.view(), up.view(), gate.view());
      ops.linear(gate.view(), w.down, down.view());
      if (w.down_bias != nullptr) ops.add_bias(down.view(), w.down_bias);
      for (int64_t i = 0; i < s.model; ++i) {
        out.view().row(t)[i] += layer.weights.read().row(t)[a] * down.view().row(0)[i];
      }
    }
  }
  return out;
}

class ExpertFfn : public OnEveryBackend {};

TEST_P(ExpertFfn, IsTheUnfusedOperations) {
  using enum MatrixFormat;
  Random random(21);
  for (auto [up, down] :
       {std::pair{kNvfp4, kNvfp4}, {kBF16, kBF16}, {kNvfp4, kBF16}, {kBF16, kNvfp4}, {kF32, kF16}}) {
    for (Shape shape : {Shape{16, 4, 64, 32, 1}, Shape{16, 4, 400, 208, 9}, Shape{5, 2, 128, 256, 3},
                        Shape{3, 3, 144, 272, 131}}) {
      Layer layer(random, shape, up, down);
      EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer).view(), unfused(*ops_, layer).view()))
          << matrix_format_name(up) << ", tokens " << shape.tokens;
    }
  }
}

TEST_P(ExpertFfn, ManyExpertsFewRows) {
  Random random(22);
  Layer layer(random, {257, 9, 48, 80, 7}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer).view(), unfused(*ops_, layer).view()));
}

TEST_P(ExpertFfn, AllRowsOnOneExpertAndTwiceInARow) {
  Random random(23);
  Layer layer(random, {4, 2, 80, 48, 20}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  for (size_t i = 0; i < layer.ids.size(); ++i) layer.ids[i] = 2;
  RowsBuffer first = expert_ffn(*ops_, layer);
  EXPECT_TRUE(same_bits(first.view(), unfused(*ops_, layer).view()));
  EXPECT_TRUE(same_bits(first.view(), expert_ffn(*ops_, layer).view()));
}

TEST_P(ExpertFfn, EveryFormat) {
  Random random(27);
  for (MatrixFormat format : kFormats) {
    for (Shape shape : {Shape{4, 2, 256, 256, 3}, Shape{3, 3, 512, 256, 9}}) {
      Layer layer(random, shape, format, format);
      EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer).view(), unfused(*ops_, layer).view()))
          << matrix_format_name(format) << ", tokens " << shape.tokens;
    }
  }
}

TEST_P(ExpertFfn, BiasesAndActivations) {
  using enum MatrixFormat;
  Random random(28);
  for (auto [up, down] : {std::pair{kMxfp4, kMxfp4}, {kBF16, kQ4}, {kGgufQ4_0, kF32}}) {
    for (ActivationSpec activation : {ActivationSpec{}, ActivationSpec{ActivationSpec::kSiluClamped, 0.5f},
                                      ActivationSpec{ActivationSpec::kGptOss, 0.7f}}) {
      for (Shape shape : {Shape{9, 3, 96, 160, 2}, Shape{8, 4, 160, 96, 33}}) {
        Layer layer(random, shape, up, down);
        layer.activation = activation;
        RowsBuffer without = expert_ffn(*ops_, layer);
        layer.add_biases(random);
        RowsBuffer with = expert_ffn(*ops_, layer);
        EXPECT_TRUE(same_bits(with.view(), unfused(*ops_, layer).view())) << matrix_format_name(up);
        EXPECT_FALSE(same_bits(with.view(), without.view()));
      }
    }
  }
}

// Layers whose experts differ in format, as real files have them in places.
TEST_P(ExpertFfn, MixedFormats) {
  Random random(24);
  Shape shape{5, 2, 256, 512, 6};
  // One packing for all (the fused path), two kinds of it, and one matrix of another.
  const std::vector<std::vector<MatrixFormat>> mixes = {
      {MatrixFormat::kNvfp4, MatrixFormat::kMxfp4, MatrixFormat::kQ4},
      {MatrixFormat::kBF16, MatrixFormat::kF8E4M3, MatrixFormat::kGgufQ6K, MatrixFormat::kFp8Block},
      {std::begin(kFormats), std::end(kFormats)}};
  for (const std::vector<MatrixFormat>& mix : mixes) {
    Layer layer(random, shape, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
    std::vector<TestMatrix> others;
    others.reserve(layer.experts.size() * 3);
    for (ExpertWeights& expert : layer.experts) {
      for (Matrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        others.emplace_back(random, mix[others.size() % mix.size()], matrix->n, matrix->k, 0.02f);
        *matrix = others.back().matrix;
      }
    }
    EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer).view(), unfused(*ops_, layer).view()))
        << matrix_format_name(mix.front());
  }
  Layer layer(random, shape, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  TestMatrix up(random, MatrixFormat::kBF16, shape.width, shape.model);
  layer.experts[1].up = up.matrix;
  EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer).view(), unfused(*ops_, layer).view()));
}

TEST_P(ExpertFfn, ChunksAndThreadsChangeNoBit) {
  Random random(25);
  Layer layer(random, {8, 3, 192, 144, 35}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  RowsBuffer wanted = expert_ffn(*ops_, layer);
  for (int64_t chunk : {1, 2, 8, 17}) {
    for (int64_t t = 0; t < 35; t += chunk) {
      const int64_t count = std::min<int64_t>(chunk, 35 - t);
      EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer, t, count).view(), wanted.view().slice(t, count)));
    }
  }
  for (int threads : {1, 2, 3, 7}) {
    std::unique_ptr<OnHostData> ops = make_ops(GetParam(), threads);
    EXPECT_TRUE(same_bits(expert_ffn(*ops, layer).view(), wanted.view())) << threads << " threads";
  }
}

TEST_P(ExpertFfn, NoTokensIsNoWork) {
  Random random(26);
  Layer layer(random, {2, 1, 16, 16, 1}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  expert_ffn(*ops_, layer, 0, 0);
}

INSTANTIATE_ON_ALL_BACKENDS(ExpertFfn);

}  // namespace
}  // namespace nibble::testing
