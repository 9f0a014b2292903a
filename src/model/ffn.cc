#include "model/ffn.h"

#include <vector>

namespace nibble {
namespace {

// The product of the activation of what stands in ffn_gate and ffn_up.
void glu_down(Step& step, int64_t width, const Product& down) {
  step.ops.glu_linear(step.spec.activation, narrow(step.act.ffn_gate, width), narrow(step.act.ffn_up, width),
                      down);
}

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
                       .out = act.sublayer,
                       .arithmetic = step.arithmetic,
                       .add_to = step.add_to});
  if (spec.shared_width > 0) {
    const bool leaves_it = step.add_to.data == nullptr;
    glu_down(step, spec.shared_width,
             {weights.shared.down, nullptr, act.shared, leaves_it ? act.sublayer : step.add_to});
  }
}

}  // namespace

void feed_forward(Step& step, size_t layer, const LayerSpec& spec, const FfnWeights& weights) {
  if (spec.moe) {
    moe(step, layer, *spec.moe, weights);
  } else {
    const Product gate_up[] = {{weights.dense.gate, nullptr, narrow(step.act.ffn_gate, spec.dense_width)},
                               {weights.dense.up, nullptr, narrow(step.act.ffn_up, spec.dense_width)}};
    input_products(step, gate_up);
    glu_down(step, spec.dense_width, output_product(step, weights.dense.down));
  }
}

}  // namespace nibble
