// DeepSeek-V3 ("deepseek_v3"): multi-head latent attention with a part for RoPE, grouped sigmoid router.
#include <cmath>

#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec deepseek_v3_spec(Config config) {
  ModelSpec spec = read_common(config);
  ignore_next_token_layers(config, spec);
  config.only("attention_bias", {false});
  config.only("moe_layer_freq", {1});
  config.ignore({"head_dim", "qk_head_dim", "num_key_value_heads"});  // follow from the dims below
  MlaSpec mla;
  mla.heads = config.integer("num_attention_heads", 1, limits::kHeads);
  if (config.has("q_lora_rank")) mla.q_rank = config.integer("q_lora_rank", 1, limits::kWidth);
  config.ignore({"q_lora_rank"});
  mla.kv_rank = config.integer("kv_lora_rank", 1, limits::kWidth);
  mla.nope_dim = config.integer("qk_nope_head_dim", 1, limits::kHeadDim);
  mla.rope_dim = config.integer("qk_rope_head_dim", 2, limits::kHeadDim);
  mla.value_dim = config.integer("v_head_dim", 1, limits::kHeadDim);
  mla.rope_style = config.boolean("rope_interleave", true) ? RopeStyle::kInterleaved : RopeStyle::kHalves;
  check_latent(config, mla);
  spec.ropes = {read_model_rope(config, mla.rope_dim)};
  mla.scale = 1 / std::sqrt(static_cast<float>(mla.query_dim()));
  if (const RopeSpec& rope = spec.ropes[0]; rope.type == RopeSpec::Type::kYarn && rope.mscale_all_dim > 0) {
    // The longer context sharpens attention: the factor goes on q and on k.
    const double mscale = 0.1 * rope.mscale_all_dim * std::log(rope.factor) + 1;
    mla.scale *= static_cast<float>(mscale * mscale);
  }

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
    spec.layers[i].mixer = mla;
    if (static_cast<int64_t>(i) < dense_layers) {
      spec.layers[i].dense_width = dense_width;
    } else {
      spec.layers[i].moe = moe;
    }
  }
  return spec;
}

}  // namespace nibble
