// Grouped-query attention.
#include <cmath>

#include "model/mixers.h"

namespace nibble {
namespace {

enum Scratch : size_t { kQuery, kKey, kValue, kAttended, kGate };

void linear(Step& step, const Matrix& weight, const float* bias, Rows<const float> x, Rows<float> out) {
  step.ops.linear(x, weight, out);
  if (bias != nullptr) step.ops.add_bias(out, bias);
}

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

  linear(step, weights.query, weights.query_bias, act.normed, query);
  linear(step, weights.key, weights.key_bias, act.normed, key);
  linear(step, weights.value, weights.value_bias, act.normed, value);
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
    Rows<float> gate = narrow(act.mixer[kGate], spec.gate_width());
    ops.linear(act.normed, weights.output_gate, gate);
    ops.gate_output(spec.output_gate, gate, spec.head_dim, attended);
  }
  linear(step, weights.output, weights.output_bias, attended, act.sublayer);
}

}  // namespace nibble
