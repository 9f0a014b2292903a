// gpt-oss ("gpt_oss"): sliding and full attention in turn, with sinks and biases everywhere; experts as one
// MXFP4 tensor with gate and up rows interleaved; softmax over the chosen logits; its own activation.
#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec gpt_oss_spec(Config config) {
  ModelSpec spec = read_common(config);
  spec.names.router = "mlp.router";
  const int64_t layer_count = static_cast<int64_t>(spec.layers.size());
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = gqa.output_bias = config.boolean("attention_bias", true);
  gqa.sinks = true;
  check_heads(config, gqa, 0);
  spec.ropes = {read_model_rope(config, gqa.head_dim)};
  config.ignore({"initial_context_length", "rope_theta"});
  spec.activation = {.kind = ActivationSpec::Kind::kGptOss};
  spec.activation.limit = static_cast<float>(config.number("swiglu_limit", 0.1, 1e6, 7.0));

  MoeSpec moe;
  moe.experts = config.integer("num_local_experts", 1, limits::kExperts);
  config.ignore({"num_experts", "experts_per_token"});  // again
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("intermediate_size", 1, limits::kWidth);
  moe.router.score = RouterScore::kSoftmaxChosen;
  moe.router.renormalize = false;
  moe.router_logit_bias = true;
  moe.biases = moe.stacked = true;

  const int64_t window = config.integer("sliding_window", 1, limits::kPositions, 128);
  std::vector<std::string> types(spec.layers.size());
  for (size_t i = 0; i < types.size(); ++i) types[i] = i % 2 == 0 ? "sliding_attention" : "full_attention";
  if (config.has("layer_types")) types = config.texts("layer_types", layer_count);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (types[i] != "sliding_attention" && types[i] != "full_attention") {
      config.fail(
          fmt::format("key 'layer_types', entry {}: '{}' is not implemented; implemented: full_attention, "
                      "sliding_attention",
                      i, types[i]));
    }
    gqa.window = types[i] == "sliding_attention" ? window : 0;
    spec.layers[i].mixer = gqa;
    spec.layers[i].moe = moe;
  }
  return spec;
}

}  // namespace nibble
