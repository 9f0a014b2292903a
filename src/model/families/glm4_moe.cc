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
  read_deepseek_ffn(config, spec);
  for (LayerSpec& layer : spec.layers) layer.mixer = gqa;
  return spec;
}

}  // namespace nibble
