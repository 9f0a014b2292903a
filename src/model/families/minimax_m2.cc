// MiniMax-M2 ("minimax_m2"): attention with one norm over all heads, partial RoPE, sigmoid router with bias.
#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec minimax_m2_spec(Config config) {
  ModelSpec spec = read_common(config);
  spec.names.router = "block_sparse_moe.gate";
  spec.names.router_bias = "block_sparse_moe.e_score_correction_bias";
  spec.names.experts = "block_sparse_moe.experts.";
  spec.names.gate_proj = "w1";
  spec.names.up_proj = "w3";
  spec.names.down_proj = "w2";
  config.only("use_qk_norm", {true});
  config.only("qk_norm_type", {"per_layer"});
  config.only("use_routing_bias", {true});
  config.only("use_mtp", {false, true});  // layers for prediction ahead are passed over
  config.only("shared_intermediate_size", {0});
  config.only("norm_topk_prob", {true});
  config.ignore({"num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size"});
  if (config.has("attn_type_list"))  // 1: softmax attention
    config.integers("attn_type_list", std::ssize(spec.layers), 1, 1);
  ignore_next_token_layers(config, spec);
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qk_norm = QkNorm::kFull;
  check_heads(config, gqa, 0);
  spec.ropes = {read_model_rope(config, gqa.head_dim)};
  if (config.has("rotary_dim")) spec.ropes[0].rotary_dim = config.integer("rotary_dim", 2, gqa.head_dim);
  if (spec.ropes[0].rotary_dim % 2 != 0)
    config.fail("key " + config.describe("rotary_dim") + ": wanted an even number");
  MoeSpec moe;
  moe.experts = config.integer("num_local_experts", 1, limits::kExperts);
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("intermediate_size", 1, limits::kWidth);
  moe.router = read_sigmoid_router(config, moe.experts);
  check_chosen(config, moe);
  moe.router_bias_required = true;
  for (LayerSpec& layer : spec.layers) {
    layer.mixer = gqa;
    layer.moe = moe;
  }
  return spec;
}

}  // namespace nibble
