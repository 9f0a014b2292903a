// Grouped-query attention.
#include <cmath>
#include <vector>

#include "model/mixers.h"

namespace nibble {
namespace {

enum Scratch : size_t { kQuery, kKey, kValue, kAttended, kGate };

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
  input_products(step, products);
  if (spec.qk_norm == QkNorm::kFull) {
    ops.rms_norm(query, weights.query_norm, step.spec.norm_eps, query);
    ops.rms_norm(key, weights.key_norm, step.spec.norm_eps, key);
  }
  const bool norm_heads = spec.qk_norm == QkNorm::kHead;
  const KvView kv = step.kv.view(cache.kv[0]);
  ops.prepare_and_attend({.q = query,
                          .k = key,
                          .v = value,
                          .q_norm = norm_heads ? weights.query_norm : nullptr,
                          .k_norm = norm_heads ? weights.key_norm : nullptr,
                          .eps = step.spec.norm_eps,
                          .rope_table = act.ropes[spec.rope],
                          .rope_style = spec.rope_style,
                          .rows = step.rows,
                          .kv = kv},
                         {.q = query,
                          .kv = kv,
                          .rows = step.rows,
                          .window = spec.window,
                          .scale = 1.0f / std::sqrt(static_cast<float>(spec.head_dim)),
                          .out = attended,
                          .sinks_H = weights.sinks,
                          .gate_kind = spec.output_gate,
                          .gate = gate});
  output(step, attended, weights.output, weights.output_bias);
}

}  // namespace nibble
