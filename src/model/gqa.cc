// Grouped-query attention.
#include <cmath>
#include <vector>

#include "model/mixers.h"

namespace nibble {
namespace {

enum Scratch : size_t { kQuery, kKey, kValue, kAttended, kGate };

void norm(Step& step, const GqaSpec& spec, Rows<float> x, const float* weight) {
  if (spec.qk_norm == QkNorm::kHead) norm_heads(step, x, spec.head_dim, weight);
  if (spec.qk_norm == QkNorm::kFull) step.ops.rms_norm(x, weight, step.spec.norm_eps, x);
}

}  // namespace

std::vector<int64_t> gqa_scratch(const GqaSpec& spec) {
  return {spec.query_width(), spec.kv_width(), spec.kv_width(), spec.query_width(), spec.gate_width()};
}

void gqa(Step& step, const LayerCache& cache, const GqaSpec& spec, const GqaWeights& weights) {
  Ops& ops = step.ops;
  Activations& act = step.act;
  Rows<float> query = narrow(act.mixer[kQuery], spec.query_width());
  Rows<float> key = narrow(act.mixer[kKey], spec.kv_width());
  Rows<float> value = narrow(act.mixer[kValue], spec.kv_width());
  Rows<float> attended = narrow(act.mixer[kAttended], spec.query_width());

  const Rows<float> gate = narrow(act.mixer[kGate], spec.gate_width());
  std::vector<Product> products = {{weights.query, weights.query_bias, query},
                                   {weights.key, weights.key_bias, key},
                                   {weights.value, weights.value_bias, value}};
  if (spec.output_gate != OutputGate::kNone) products.push_back({weights.output_gate, nullptr, gate});
  ops.linears(act.normed, products);
  norm(step, spec, query, weights.query_norm);
  norm(step, spec, key, weights.key_norm);
  ops.rope(query, spec.head_dim, act.ropes[spec.rope], spec.rope_style);
  ops.rope(key, spec.head_dim, act.ropes[spec.rope], spec.rope_style);

  const KvView kv = step.kv.view(cache.kv[0]);
  ops.write_kv(key, value, step.rows, kv);
  ops.attend({.q = query,
              .kv = kv,
              .rows = step.rows,
              .window = spec.window,
              .scale = 1.0f / std::sqrt(static_cast<float>(spec.head_dim)),
              .out = attended,
              .sinks_H = weights.sinks});
  if (spec.output_gate != OutputGate::kNone) {
    ops.gate_output(spec.output_gate, gate, spec.head_dim, attended);
  }
  const Product output[] = {{weights.output, weights.output_bias, act.sublayer}};
  ops.linears(attended, output);
}

}  // namespace nibble
