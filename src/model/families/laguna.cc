// Laguna (poolside; model_type "laguna"): sliding and full attention layers with their own head counts and
// RoPE, qk-norm, softplus output gate, sigmoid router with selection bias, one shared expert.
// Names are those on disk, which differ from the module names of the reference implementation (transformers).
#include <algorithm>

#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {
namespace {

OutputGate read_gating(Config& config, int64_t layer_count) {
  config.only("gating", {true, "per-head", "per-element"});
  OutputGate gate =
      config.equals("gating", "per-element") ? OutputGate::kSoftplusElement : OutputGate::kSoftplusHead;
  if (config.has("gating_types")) {
    const std::string wanted = gate == OutputGate::kSoftplusElement ? "per-element" : "per-head";
    for (const std::string& type : config.texts("gating_types", layer_count)) {
      if (type != wanted)
        config.fail("key 'gating_types': layers with other gates than 'gating' says are not implemented");
    }
  }
  return gate;
}

RouterSpec read_router(Config& config) {
  RouterSpec router;
  config.only("moe_router_score_func", {"sigmoid", "sqrtsoftplus"});
  config.only("norm_topk_prob", {true});
  config.only("moe_apply_router_weight_on_input", {false});
  if (config.text("moe_router_score_func", "sigmoid") == "sqrtsoftplus")
    router.score = RouterScore::kSqrtSoftplus;
  router.logit_softcap = static_cast<float>(config.number("moe_router_logit_softcapping", 0, 1e6, 0.0));
  router.scale = static_cast<float>(config.number("moe_routed_scaling_factor", 0, 1e6, 1.0));
  return router;
}

}  // namespace

ModelSpec laguna_spec(Config config) {
  ModelSpec spec = read_common(config);
  spec.names.router_bias = "mlp.experts.e_score_correction_bias";
  spec.names.shared = "mlp.shared_expert.";
  config.only("attention_bias", {false});
  config.only("swa_attention_sink_enabled", {false});
  config.only("decoder_sparse_step", {1});
  const int64_t layer_count = static_cast<int64_t>(spec.layers.size());

  GqaSpec attention = read_gqa(config, spec);
  attention.qk_norm = QkNorm::kHead;
  std::vector<int64_t> layer_heads(spec.layers.size(), attention.heads);
  if (config.has("num_attention_heads_per_layer")) {
    layer_heads = config.integers("num_attention_heads_per_layer", layer_count, 1, limits::kHeads);
  }
  std::vector<std::string> layer_types(spec.layers.size(), "full_attention");
  if (config.has("layer_types")) layer_types = config.texts("layer_types", layer_count);
  std::vector<std::string> mlp_types(spec.layers.size(), "sparse");
  mlp_types[0] = "dense";
  if (config.has("mlp_layer_types")) mlp_types = config.texts("mlp_layer_types", layer_count);
  if (config.has("mlp_only_layers")) {
    // Says again what mlp_layer_types says, and must say the same.
    std::vector<int64_t> dense;
    for (int64_t i = 0; i < layer_count; ++i) {
      if (mlp_types[static_cast<size_t>(i)] == "dense") dense.push_back(i);
    }
    if (config.integer_or_list("mlp_only_layers", 0, layer_count - 1) != dense) {
      config.fail("key " + config.describe("mlp_only_layers") +
                  ": wanted the dense layers of mlp_layer_types");
    }
  }
  const bool any_sliding = std::count(layer_types.begin(), layer_types.end(), "sliding_attention") > 0;

  attention.output_gate = read_gating(config, layer_count);
  const int64_t window = any_sliding ? config.integer("sliding_window", 1, limits::kPositions) : 0;
  if (!any_sliding) config.ignore({"sliding_window"});

  Config ropes = config.object("rope_parameters");
  spec.ropes.push_back(read_rope(ropes.object("full_attention"), attention.head_dim));
  if (any_sliding) spec.ropes.push_back(read_rope(ropes.object("sliding_attention"), attention.head_dim));

  MoeSpec moe;
  moe.experts = config.integer("num_experts", 1, limits::kExperts);
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("moe_intermediate_size", 1, limits::kWidth);
  moe.shared_width = config.integer("shared_expert_intermediate_size", 0, limits::kWidth);
  moe.router = read_router(config);
  const int64_t dense_width = config.integer("intermediate_size", 1, limits::kWidth);

  for (size_t i = 0; i < spec.layers.size(); ++i) {
    LayerSpec& layer = spec.layers[i];
    attention.heads = layer_heads[i];
    attention.window = 0;
    attention.rope = 0;
    check_heads(config, attention, i);
    if (layer_types[i] == "sliding_attention") {
      attention.window = window;
      attention.rope = 1;
    } else if (layer_types[i] != "full_attention") {
      config.fail(
          fmt::format("key 'layer_types', entry {}: '{}' is not implemented; implemented: full_attention, "
                      "sliding_attention",
                      i, layer_types[i]));
    }
    layer.mixer = attention;
    if (mlp_types[i] == "sparse") {
      layer.moe = moe;
    } else if (mlp_types[i] == "dense") {
      layer.dense_width = dense_width;
    } else {
      config.fail(
          fmt::format("key 'mlp_layer_types', entry {}: '{}' is not implemented; implemented: dense, sparse",
                      i, mlp_types[i]));
    }
  }
  return spec;
}

}  // namespace nibble
