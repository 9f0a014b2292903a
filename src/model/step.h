// What the parts of a forward pass share while a step runs.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kv/kv_cache.h"
#include "model/activations.h"
#include "model/spec.h"
#include "ops/ops.h"

namespace nibble {

// Looks into a forward pass, for golden tests and router traces. Views are in the backend's memory and valid
// during the call.
struct Trace {
  // The residual stream [T, D] after the embedding (layer 0) and after layer n (n + 1).
  std::function<void(size_t layer, Rows<const float> residual)> hidden;
  // The experts [T, A] that layer n chose.
  std::function<void(size_t layer, Rows<const int32_t> expert_ids)> experts;
};

// Where a layer keeps what it remembers: indices into the KV cache.
struct LayerCache {
  std::vector<size_t> kv;      // KvCache::view
  std::vector<size_t> states;  // KvCache::state
};

struct Step {
  Ops& ops;
  const ModelSpec& spec;
  const KvCache& kv;
  Activations act;
  const int32_t* ids_T;
  std::span<const int32_t> logit_rows;  // which rows of the step they are
  RowsOfStep rows;
  ExpertArithmetic arithmetic;
  const Trace* trace = nullptr;
  // Of the sublayer that runs: its input, the weight of the norm of that, and what its output is added to
  // (null: to nothing, it is left in act.sublayer).
  Rows<const float> input = {};
  const float* input_norm = nullptr;
  Rows<float> add_to = {};
};

// How a sublayer begins: act.normed becomes its normed input, and `products` those of act.normed.
inline void input_products(Step& step, std::span<const Product> products) {
  step.ops.norm_linears(step.input, step.input_norm, step.spec.norm_eps, step.act.normed, products);
}
// How it ends: the product that is its output.
inline Product output_product(Step& step, const Matrix& weight, const float* bias = nullptr) {
  return {weight, bias, step.act.sublayer, step.add_to};
}
inline void output(Step& step, Rows<const float> x, const Matrix& weight, const float* bias = nullptr) {
  const Product product = output_product(step, weight, bias);
  step.ops.linears(x, {&product, 1});
}

// The first `cols` columns of a view that was cut for the widest layer, as a dense matrix of that width.
template <class T>
Rows<T> narrow(const Rows<T>& view, int64_t cols) {
  return {view.data, view.rows, cols};
}

}  // namespace nibble
