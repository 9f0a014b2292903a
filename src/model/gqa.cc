#include "model/gqa.h"

#include <cmath>

namespace nibble {
namespace {

// RMSNorm over each head on its own.
void norm_heads(Step& step, Rows<float> x, int64_t head_dim, const float* weight) {
  Rows<float> heads(x.data, x.rows * (x.cols / head_dim), head_dim);
  step.ops.rms_norm(heads, weight, step.spec.norm_eps, heads);
}

}  // namespace

void gqa(Step& step, size_t layer, const AttentionSpec& spec, const AttentionWeights& weights) {
  Ops& ops = step.ops;
  Activations& act = step.act;
  Rows<float> query = narrow(act.query, spec.query_width());
  Rows<float> key = narrow(act.key, spec.kv_width());
  Rows<float> value = narrow(act.value, spec.kv_width());
  Rows<float> attended = narrow(act.attended, spec.query_width());

  ops.linear(act.normed, weights.query, query);
  ops.linear(act.normed, weights.key, key);
  ops.linear(act.normed, weights.value, value);
  norm_heads(step, query, spec.head_dim, weights.query_norm);
  norm_heads(step, key, spec.head_dim, weights.key_norm);
  ops.rope(query, spec.head_dim, act.ropes[spec.rope]);
  ops.rope(key, spec.head_dim, act.ropes[spec.rope]);

  const KvView kv = step.kv.view(layer);
  ops.write_kv(key, value, step.rows, kv);
  ops.attend({.q = query,
              .kv = kv,
              .rows = step.rows,
              .window = spec.window,
              .scale = 1.0f / std::sqrt(static_cast<float>(spec.head_dim)),
              .out = attended});
  if (spec.output_gate != OutputGate::kNone) {
    Rows<float> gate = narrow(act.output_gate, spec.gate_width());
    ops.linear(act.normed, weights.output_gate, gate);
    ops.gate_output(spec.output_gate, gate, spec.head_dim, attended);
  }
  ops.linear(attended, weights.output, act.sublayer);
}

}  // namespace nibble
