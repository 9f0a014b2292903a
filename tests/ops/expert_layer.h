// A layer of random routed experts, and what it gives.
#pragma once

#include "ops/backends.h"

namespace nibble::testing {

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

inline RowsBuffer expert_ffn(OnHostData& ops, const Layer& layer, const PlacedExperts& placed, int64_t first,
                             int64_t count, const ExpertArithmetic& arithmetic = {}) {
  Scratch scratch(layer.shape);
  RowsBuffer out(count, layer.shape.model);
  Rows<const int32_t> ids(layer.ids.data(), layer.shape.tokens, layer.shape.chosen);
  ops.expert_ffn({layer.x.read().slice(first, count), ids.slice(first, count),
                  layer.weights.read().slice(first, count), placed, layer.activation, scratch.view(),
                  out.view(), arithmetic});
  return out;
}

inline RowsBuffer expert_ffn(OnHostData& ops, const Layer& layer, int64_t first = 0, int64_t count = -1,
                             const ExpertArithmetic& arithmetic = {}) {
  const std::unique_ptr<PlacedExperts> placed = ops.place_experts(layer.experts);
  return expert_ffn(ops, layer, *placed, first, count < 0 ? layer.shape.tokens : count, arithmetic);
}

}  // namespace nibble::testing
