// OLMoE ("olmoe"): attention with one norm over all heads of q and of k, softmax router without
// renormalization.
#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec olmoe_spec(Config config) {
  ModelSpec spec = read_common(config);
  config.only("clip_qkv", {});
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qk_norm = QkNorm::kFull;
  gqa.qkv_bias = gqa.output_bias = config.boolean("attention_bias", false);
  check_heads(config, gqa, 0);
  spec.ropes = {read_model_rope(config, gqa.head_dim)};
  MoeSpec moe;
  moe.experts = config.integer("num_experts", 1, limits::kExperts);
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("intermediate_size", 1, limits::kWidth);
  moe.router.score = RouterScore::kSoftmaxAll;
  moe.router.renormalize = config.boolean("norm_topk_prob", false);
  for (LayerSpec& layer : spec.layers) {
    layer.mixer = gqa;
    layer.moe = moe;
  }
  return spec;
}

}  // namespace nibble
