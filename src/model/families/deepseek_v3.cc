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

  read_deepseek_ffn(config, spec);
  for (LayerSpec& layer : spec.layers) layer.mixer = mla;
  return spec;
}

}  // namespace nibble
