// GLM-4.5 and its kin ("glm4_moe"): GQA with biases on q, k, v, partial RoPE, the router of DeepSeek-V3.
#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec glm4_moe_spec(Config config) {
  ModelSpec spec = read_common(config);
  ignore_next_token_layers(config, spec);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qk_norm = config.boolean("use_qk_norm", false) ? QkNorm::kHead : QkNorm::kNone;
  gqa.qkv_bias = config.boolean("attention_bias", false);
  check_heads(config, gqa, 0);
  spec.ropes = {read_model_rope(config, gqa.head_dim)};
  MoeSpec moe;
  moe.experts = config.integer("n_routed_experts", 1, limits::kExperts);
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("moe_intermediate_size", 1, limits::kWidth);
  moe.shared_width = moe.width * config.integer("n_shared_experts", 0, 64, 1);
  moe.router = read_sigmoid_router(config, moe.experts);
  moe.router_bias_required = true;
  const int64_t dense_width = config.integer("intermediate_size", 1, limits::kWidth);
  const int64_t dense_layers = config.integer("first_k_dense_replace", 0, limits::kLayers, 0);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    spec.layers[i].mixer = gqa;
    if (static_cast<int64_t>(i) < dense_layers) {
      spec.layers[i].dense_width = dense_width;
    } else {
      spec.layers[i].moe = moe;
    }
  }
  return spec;
}

}  // namespace nibble
