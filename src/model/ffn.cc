#include "model/ffn.h"

#include <vector>

namespace nibble {
namespace {

void moe(Step& step, size_t layer, const MoeSpec& spec, const FfnWeights& weights) {
  Activations& act = step.act;
  Rows<float> logits = narrow(act.router_logits, spec.experts);
  Rows<int32_t> ids = narrow(act.expert_ids, spec.chosen);
  Rows<float> expert_weights = narrow(act.expert_weights, spec.chosen);
  std::vector<Product> products = {{weights.router, weights.router_logit_bias, logits}};
  if (spec.shared_width > 0) {
    products.push_back({weights.shared.gate, nullptr, narrow(act.ffn_gate, spec.shared_width)});
    products.push_back({weights.shared.up, nullptr, narrow(act.ffn_up, spec.shared_width)});
  }
  input_products(step, products);
  const RouteArgs route = {.logits = logits,
                           .bias_E = weights.router_bias,
                           .spec = spec.router,
                           .ids = ids,
                           .weights = expert_weights};
  const SharedExpert shared = {narrow(act.ffn_gate, spec.shared_width), narrow(act.ffn_up, spec.shared_width),
                               weights.shared.down, act.shared};
  step.ops.routed_ffn(route,
                      {.x = act.normed,
                       .ids = ids,
                       .weights = expert_weights,
                       .experts = *weights.experts,
                       .activation = step.spec.activation,
                       .scratch = {.gathered = act.expert_gathered,
                                   .gate = narrow(act.expert_gate, spec.width),
                                   .up = narrow(act.expert_up, spec.width),
                                   .down = act.expert_down},
                       .out = act.sublayer,
                       .arithmetic = step.arithmetic,
                       .add_to = step.add_to},
                      spec.shared_width > 0 ? &shared : nullptr);
  if (step.trace != nullptr && step.trace->experts) step.trace->experts(layer, ids);
}

}  // namespace

void feed_forward(Step& step, size_t layer, const LayerSpec& spec, const FfnWeights& weights) {
  if (spec.moe) {
    moe(step, layer, *spec.moe, weights);
  } else {
    const Product gate_up[] = {{weights.dense.gate, nullptr, narrow(step.act.ffn_gate, spec.dense_width)},
                               {weights.dense.up, nullptr, narrow(step.act.ffn_up, spec.dense_width)}};
    input_products(step, gate_up);
    step.ops.glu_linear(step.spec.activation, narrow(step.act.ffn_gate, spec.dense_width),
                        narrow(step.act.ffn_up, spec.dense_width), output_product(step, weights.dense.down));
  }
}

}  // namespace nibble
