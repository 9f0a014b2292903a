// Mixtral ("mixtral"): softmax over the logits of the chosen experts; w1 is the gate, w3 up, w2 down.
#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec mixtral_spec(Config config) {
  ModelSpec spec = read_common(config);
  spec.names.router = "block_sparse_moe.gate";
  spec.names.experts = "block_sparse_moe.experts.";
  spec.names.gate_proj = "w1";
  spec.names.up_proj = "w3";
  spec.names.down_proj = "w2";
  GqaSpec gqa = read_gqa(config, spec);
  if (config.has("sliding_window")) gqa.window = config.integer("sliding_window", 1, limits::kPositions);
  config.ignore({"sliding_window"});
  check_heads(config, gqa, 0);
  spec.ropes = {read_model_rope(config, gqa.head_dim)};
  MoeSpec moe;
  moe.experts = config.integer("num_local_experts", 1, limits::kExperts);
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("intermediate_size", 1, limits::kWidth);
  moe.router.score = RouterScore::kSoftmaxChosen;
  moe.router.renormalize = false;  // the softmax over the chosen has done it
  for (LayerSpec& layer : spec.layers) {
    layer.mixer = gqa;
    layer.moe = moe;
  }
  return spec;
}

}  // namespace nibble
