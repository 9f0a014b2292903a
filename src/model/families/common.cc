#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec read_common(Config& config) {
  ModelSpec spec;
  spec.width = config.integer("hidden_size", 1, limits::kWidth);
  spec.vocab = config.integer("vocab_size", 1, limits::kVocab);
  spec.layers.resize(static_cast<size_t>(config.integer("num_hidden_layers", 1, limits::kLayers)));
  spec.max_positions = config.integer("max_position_embeddings", 1, limits::kPositions);
  spec.norm_eps = static_cast<float>(config.number("rms_norm_eps", 0, 1));
  spec.tied_head = config.boolean("tie_word_embeddings", false);
  config.only("hidden_act", {"silu"});
  // The tokenizer adds bos where the model wants it.
  if (config.has("bos_token_id")) config.integer("bos_token_id", 0, spec.vocab - 1);
  for (int64_t id : config.integer_or_list("eos_token_id", 0, spec.vocab - 1)) {
    spec.eos.push_back(static_cast<int32_t>(id));
  }
  config.ignore({"architectures", "model_type", "bos_token_id", "pad_token_id", "dtype", "torch_dtype",
                 "transformers_version", "use_cache", "initializer_range", "attention_dropout",
                 "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "quantization_config",
                 "auto_map", "_name_or_path", "pretraining_tp", "hidden_dropout", "ep_size"});
  return spec;
}

GqaSpec read_gqa(Config& config, const ModelSpec& spec) {
  GqaSpec gqa;
  gqa.heads = config.integer("num_attention_heads", 1, limits::kHeads);
  gqa.kv_heads = config.integer("num_key_value_heads", 1, limits::kHeads, gqa.heads);
  gqa.head_dim = config.integer("head_dim", 2, limits::kHeadDim, spec.width / gqa.heads);
  if (gqa.head_dim < 2 || gqa.head_dim > limits::kHeadDim) {  // what follows from the others
    config.fail(
        fmt::format("{} heads are too many for a width of {}, or too few: a head has 2 to {} elements",
                    gqa.heads, spec.width, limits::kHeadDim));
    gqa.head_dim = 2;
  }
  if (config.boolean("rope_interleaved", false)) gqa.rope_style = RopeStyle::kInterleaved;
  return gqa;
}

void check_heads(Config& config, const GqaSpec& gqa, size_t layer) {
  if (gqa.heads % gqa.kv_heads == 0) return;
  config.fail(fmt::format("layer {}: {} query heads are no multiple of {} key/value heads (key {})", layer,
                          gqa.heads, gqa.kv_heads, config.describe("num_key_value_heads")));
}

void check_latent(Config& config, const MlaSpec& mla) {
  if (mla.latent_dim() <= limits::kHeadDim) return;
  config.fail(fmt::format("key {}: with a qk_rope_head_dim of {} more than {} together",
                          config.describe("kv_lora_rank"), mla.rope_dim, limits::kHeadDim));
}

RouterSpec read_sigmoid_router(Config& config, int64_t experts) {
  RouterSpec router;
  config.only("scoring_func", {"sigmoid"});
  config.only("topk_method", {"noaux_tc"});
  router.score = RouterScore::kSigmoid;
  router.renormalize = config.boolean("norm_topk_prob", true);
  router.renormalize_epsilon = 1e-20f;
  router.scale = static_cast<float>(config.number("routed_scaling_factor", 0, 1e6, 1.0));
  router.n_group = config.integer("n_group", 1, experts, 1);
  router.topk_group = config.integer("topk_group", 1, router.n_group, 1);
  if (experts % router.n_group != 0 || experts / router.n_group < 2) {
    config.fail(fmt::format("key {}: wanted groups of equal size and at least 2 of {} experts",
                            config.describe("n_group"), experts));
    router.n_group = router.topk_group = 1;
  }
  return router;
}

void check_chosen(Config& config, const MoeSpec& moe) {
  const int64_t candidates = moe.experts / moe.router.n_group * moe.router.topk_group;
  if (moe.chosen <= candidates) return;
  config.fail(fmt::format("key {}: only {} experts are in the {} groups of 'topk_group'",
                          config.describe("num_experts_per_tok"), candidates, moe.router.topk_group));
}

MoeSpec read_deepseek_moe(Config& config) {
  MoeSpec moe;
  moe.experts = config.integer("n_routed_experts", 1, limits::kExperts);
  moe.chosen = config.integer("num_experts_per_tok", 1, moe.experts);
  moe.width = config.integer("moe_intermediate_size", 1, limits::kWidth);
  moe.shared_width = moe.width * config.integer("n_shared_experts", 0, 64, 1);
  moe.router = read_sigmoid_router(config, moe.experts);
  check_chosen(config, moe);
  moe.router_bias_required = true;
  return moe;
}

void read_deepseek_ffn(Config& config, ModelSpec& spec) {
  const MoeSpec moe = read_deepseek_moe(config);
  const int64_t dense_width = config.integer("intermediate_size", 1, limits::kWidth);
  const int64_t dense_layers = config.integer("first_k_dense_replace", 0, limits::kLayers, 0);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (static_cast<int64_t>(i) < dense_layers) {
      spec.layers[i].dense_width = dense_width;
    } else {
      spec.layers[i].moe = moe;
    }
  }
}

void ignore_next_token_layers(Config& config, ModelSpec& spec) {
  const int64_t extra = config.integer("num_nextn_predict_layers", 0, 16, 0);
  for (int64_t i = 0; i < extra; ++i) {
    spec.names.ignored_prefixes.push_back(spec.names.layers +
                                          std::to_string(static_cast<int64_t>(spec.layers.size()) + i) + ".");
  }
}

}  // namespace nibble
