// Qwen3, dense ("qwen3") and mixture of experts ("qwen3_moe"): GQA with a norm of each head, softmax router.
#include <algorithm>

#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {
namespace {

GqaSpec read_attention(Config& config, ModelSpec& spec) {
  config.only("use_sliding_window", {false});
  config.ignore({"sliding_window", "max_window_layers"});  // of no effect without use_sliding_window
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qk_norm = QkNorm::kHead;
  gqa.qkv_bias = gqa.output_bias = config.boolean("attention_bias", false);
  check_heads(config, gqa, 0);
  spec.ropes = {read_model_rope(config, gqa.head_dim)};
  return gqa;
}

}  // namespace

ModelSpec qwen3_spec(Config config) {
  ModelSpec spec = read_common(config);
  const GqaSpec gqa = read_attention(config, spec);
  if (config.has("layer_types")) {
    for (const std::string& type : config.texts("layer_types", static_cast<int64_t>(spec.layers.size()))) {
      if (type != "full_attention")
        config.fail("key 'layer_types': '" + type + "' is not implemented; implemented: full_attention");
    }
  }
  const int64_t width = config.integer("intermediate_size", 1, limits::kWidth);
  for (LayerSpec& layer : spec.layers) {
    layer.mixer = gqa;
    layer.dense_width = width;
  }
  return spec;
}

ModelSpec qwen3_moe_spec(Config config) {
  ModelSpec spec = read_common(config);
  const GqaSpec gqa = read_attention(config, spec);
  MoeSpec moe;
  // Newer files call it num_local_experts; some have both.
  const char* experts = config.has("num_experts") ? "num_experts" : "num_local_experts";
  moe.experts = config.integer(experts, 1, limits::kExperts);
  config.ignore({"num_local_experts"});
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("moe_intermediate_size", 1, limits::kWidth);
  moe.router.score = RouterScore::kSoftmaxAll;
  moe.router.renormalize = config.boolean("norm_topk_prob", false);
  const int64_t dense_width = config.integer("intermediate_size", 1, limits::kWidth);
  const int64_t sparse_step = config.integer("decoder_sparse_step", 1, limits::kLayers, 1);
  const int64_t layer_count = static_cast<int64_t>(spec.layers.size());
  const std::vector<int64_t> dense_layers = config.integer_or_list("mlp_only_layers", 0, layer_count - 1);
  for (int64_t i = 0; i < layer_count; ++i) {
    LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
    layer.mixer = gqa;
    const bool listed = std::find(dense_layers.begin(), dense_layers.end(), i) != dense_layers.end();
    if (!listed && (i + 1) % sparse_step == 0) {
      layer.moe = moe;
    } else {
      layer.dense_width = dense_width;
    }
  }
  return spec;
}

}  // namespace nibble
