// GLM-5.3-Flash ("glm5_next"): KDA layers and MLA layers with sparse attention, four residual streams.
// Spec: spec/models.md 1. The text part of the multimodal checkpoint, or a flat config.
#include <cmath>

#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {
namespace {

// Keys of "linear_attn_config" in released files, flat "linear_*" keys in others.
KdaSpec read_kda(Config& config) {
  KdaSpec kda;
  const bool nested = config.has("linear_attn_config");
  Config c = nested ? config.object("linear_attn_config") : config;
  kda.heads = c.integer(nested ? "num_heads" : "linear_num_heads", 1, limits::kHeads);
  kda.head_dim = c.integer(nested ? "head_dim" : "linear_head_dim", 1, limits::kHeadDim);
  kda.taps = c.integer(nested ? "short_conv_kernel_size" : "linear_conv_kernel_dim", 2, 16, 4);
  const char* bound_key =
      nested ? (c.has("gate_lower_bound") ? "gate_lower_bound" : "lower_bound") : "linear_lower_bound";
  // Absent is the model's own default of -5; null turns the bound off.
  if (!c.is_null(bound_key)) kda.gate_lower_bound = static_cast<float>(c.number(bound_key, -1e3, 0, -5.0));
  c.ignore({"kda_layers", "full_attn_layers", bound_key});  // layer_types says it
  return kda;
}

MlaSpec read_mla(Config& config) {
  MlaSpec mla;
  config.only("qk_rope_head_dim", {0});
  mla.heads = config.integer("num_attention_heads", 1, limits::kHeads);
  mla.q_rank = config.integer("q_lora_rank", 1, limits::kWidth);
  mla.kv_rank = config.integer("kv_lora_rank", 1, limits::kWidth);
  mla.nope_dim = config.integer("qk_nope_head_dim", 1, limits::kHeadDim);
  mla.value_dim = config.integer("v_head_dim", 1, limits::kHeadDim);
  mla.scale = 1 / std::sqrt(static_cast<float>(mla.nope_dim));
  check_latent(config, mla);
  IndexerSpec indexer;
  indexer.heads = config.integer("index_n_heads", 1, limits::kHeads);
  indexer.head_dim = config.integer("index_head_dim", 1, limits::kHeadDim);
  indexer.pool = config.integer("index_kpool", 1, 1024);
  indexer.top_k = config.integer("index_topk", indexer.pool, limits::kPositions);
  config.only("index_kpool_always_select_tail", {true});
  if (indexer.top_k % indexer.pool != 0) {
    config.fail(fmt::format("key {}: wanted a multiple of index_kpool {}", config.describe("index_topk"),
                            indexer.pool));
  }
  mla.indexer = indexer;
  return mla;
}

}  // namespace

ModelSpec glm5_next_spec(Config outer) {
  const bool multimodal = outer.has("text_config");
  Config config = multimodal ? outer.object("text_config") : outer;
  outer.ignore({"vision_config", "image_token_id", "video_token_id", "image_start_token_id",
                "image_end_token_id", "video_start_token_id", "video_end_token_id", "architectures",
                "model_type", "dtype", "torch_dtype", "transformers_version", "quantization_config"});
  ModelSpec spec = read_common(config);
  if (multimodal) outer.only("tie_word_embeddings", {spec.tied_head});  // both have it
  const int64_t layer_count = static_cast<int64_t>(spec.layers.size());
  const std::string root = multimodal ? "model.language_model." : "model.";
  spec.names.embedding = root + "embed_tokens";
  spec.names.final_norm = root + "norm.weight";
  spec.names.layers = root + "layers.";
  spec.names.ignored_prefixes = {"model.visual.", root + "layers." + std::to_string(layer_count) + ".",
                                 root + "shared_head."};
  config.only("attention_bias", {false});
  config.ignore({"head_dim", "qk_head_dim", "num_key_value_heads", "index_topk_freq",
                 "index_skip_topk_offset", "num_nextn_predict_layers", "rope_parameters", "rope_theta"});
  const KdaSpec kda = read_kda(config);
  const MlaSpec mla = read_mla(config);

  spec.activation = {.kind = ActivationSpec::Kind::kSiluClamped};
  spec.activation.limit = static_cast<float>(config.number("swiglu_limit", 0.01, 1e6, 10.0));
  HyperSpec hyper;
  hyper.streams = config.integer("hc_mult", 1, limits::kStreams, 4);
  hyper.sinkhorn_iterations = config.integer("hc_sinkhorn_iters", 1, 1000, 20);
  hyper.eps = static_cast<float>(config.number("hc_eps", 0, 1, 1e-6));
  spec.hyper = hyper;

  const MoeSpec moe = read_deepseek_moe(config);
  const int64_t dense_width = config.integer("intermediate_size", 1, limits::kWidth);

  std::vector<std::string> types(spec.layers.size()), mlps(spec.layers.size()),
      indexers(spec.layers.size(), "full");
  for (size_t i = 0; i < types.size(); ++i) {
    types[i] = i % 4 == 3 ? "deepseek_sparse_attention" : "linear_attention";
    mlps[i] = i < 3 ? "dense" : "sparse";
  }
  if (config.has("layer_types")) types = config.texts("layer_types", layer_count);
  if (config.has("mlp_layer_types")) mlps = config.texts("mlp_layer_types", layer_count);
  if (config.has("indexer_types")) indexers = config.texts("indexer_types", layer_count);
  bool chosen_before = false;  // an MLA layer whose selection a later one may share
  auto refuse = [&](const char* key, size_t i, const std::string& value, const char* implemented) {
    config.fail(fmt::format("key '{}', entry {}: '{}' is not implemented; implemented: {}", key, i, value,
                            implemented));
  };
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    LayerSpec& layer = spec.layers[i];
    if (types[i] == "linear_attention") {
      layer.mixer = kda;
    } else if (types[i] == "deepseek_sparse_attention") {
      MlaSpec sparse = mla;
      if (indexers[i] == "shared" && chosen_before) {
        sparse.indexer.reset();
        sparse.shares_selection = true;
      } else if (indexers[i] != "full") {
        refuse("indexer_types", i, indexers[i], "full, and shared behind a full one");
      }
      chosen_before = true;
      layer.mixer = sparse;
    } else {
      refuse("layer_types", i, types[i], "linear_attention, deepseek_sparse_attention");
    }
    if (mlps[i] == "sparse") {
      layer.moe = moe;
    } else if (mlps[i] == "dense") {
      layer.dense_width = dense_width;
    } else {
      refuse("mlp_layer_types", i, mlps[i], "dense, sparse");
    }
  }
  return spec;
}

}  // namespace nibble
