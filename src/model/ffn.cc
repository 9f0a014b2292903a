#include "model/ffn.h"

namespace nibble {
namespace {

// out = down(activation(gate(normed), up(normed))).
void glu(Step& step, int64_t width, const ExpertWeights& weights, Rows<float> out) {
  Rows<float> gate = narrow(step.act.ffn_gate, width), up = narrow(step.act.ffn_up, width);
  step.ops.linear(step.act.normed, weights.gate, gate);
  step.ops.linear(step.act.normed, weights.up, up);
  step.ops.activate(step.spec.activation, gate, up, gate);
  step.ops.linear(gate, weights.down, out);
}

void moe(Step& step, size_t layer, const MoeSpec& spec, const FfnWeights& weights) {
  Activations& act = step.act;
  Rows<float> logits = narrow(act.router_logits, spec.experts);
  Rows<int32_t> ids = narrow(act.expert_ids, spec.chosen);
  Rows<float> expert_weights = narrow(act.expert_weights, spec.chosen);
  step.ops.linear(act.normed, weights.router, logits);
  if (weights.router_logit_bias != nullptr) step.ops.add_bias(logits, weights.router_logit_bias);
  step.ops.route({.logits = logits,
                  .bias_E = weights.router_bias,
                  .spec = spec.router,
                  .ids = ids,
                  .weights = expert_weights});
  if (step.trace != nullptr && step.trace->experts) step.trace->experts(layer, ids);
  step.ops.expert_ffn({.x = act.normed,
                       .ids = ids,
                       .weights = expert_weights,
                       .experts = *weights.experts,
                       .activation = step.spec.activation,
                       .scratch = {.gathered = act.expert_gathered,
                                   .gate = narrow(act.expert_gate, spec.width),
                                   .up = narrow(act.expert_up, spec.width),
                                   .down = act.expert_down},
                       .out = act.sublayer});
  if (spec.shared_width > 0) {
    glu(step, spec.shared_width, weights.shared, act.shared);
    step.ops.add(act.shared, act.sublayer);
  }
}

}  // namespace

void feed_forward(Step& step, size_t layer, const LayerSpec& spec, const FfnWeights& weights) {
  if (spec.moe) {
    moe(step, layer, *spec.moe, weights);
  } else {
    glu(step, spec.dense_width, weights.dense, step.act.sublayer);
  }
}

}  // namespace nibble
