#include "model/synthetic_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "model/config.h"

namespace nibble {
namespace {

// Sizes of the released checkpoints: spec/models.md.
constexpr const char* kLagunaS = R"({
  "model_type": "laguna", "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
  "hidden_size": 3072, "intermediate_size": 12288, "vocab_size": 100352, "max_position_embeddings": 1048576,
  "bos_token_id": 2, "eos_token_id": [2, 24],
  "num_hidden_layers": 48, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
  "gating": "per-head", "sliding_window": 512,
  "rope_parameters": {
    "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 128.0, "beta_fast": 32.0,
      "beta_slow": 1.0, "original_max_position_embeddings": 8192, "attention_factor": 1.4852030263919618,
      "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
  "num_experts": 256, "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
  "shared_expert_intermediate_size": 1024, "moe_routed_scaling_factor": 2.5
})";

constexpr const char* kLagunaXs = R"({
  "model_type": "laguna", "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
  "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 100352, "max_position_embeddings": 131072,
  "bos_token_id": 2, "eos_token_id": [2, 24],
  "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
  "gating": "per-head", "sliding_window": 512,
  "rope_parameters": {
    "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 32.0, "beta_fast": 64.0,
      "beta_slow": 1.0, "original_max_position_embeddings": 4096, "attention_factor": 1.0,
      "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
  "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
  "shared_expert_intermediate_size": 512, "moe_routed_scaling_factor": 2.5
})";

// Which layers are dense and which attend is the family's default.
constexpr const char* kGlmFlash = R"({
  "model_type": "glm5_next", "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
  "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 154880, "max_position_embeddings": 1048576,
  "eos_token_id": [154820, 154827, 154829],
  "num_hidden_layers": 45, "num_attention_heads": 64,
  "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
  "index_n_heads": 32, "index_head_dim": 128, "index_kpool": 4, "index_topk": 2048,
  "linear_attn_config": {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
  "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
  "n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
  "routed_scaling_factor": 2.5
})";

struct Shapes {
  std::string_view name;
  const char* config;
  const char* experts_key;
  int64_t
      sliding_heads;  // of Laguna's layers with a window, which are all but every fourth; 0: no such layers
};
constexpr std::array kModels = {Shapes{"laguna-s-2.1", kLagunaS, "num_experts", 72},
                                Shapes{"laguna-xs.2", kLagunaXs, "num_experts", 64},
                                Shapes{"glm-5.3-flash", kGlmFlash, "n_routed_experts", 0}};

// Of routed experts.
constexpr std::pair<std::string_view, MatrixFormat> kFormats[] = {{"format=nvfp4", MatrixFormat::kNvfp4},
                                                                  {"format=q4", MatrixFormat::kQ4},
                                                                  {"format=bf16", MatrixFormat::kBF16}};
std::optional<MatrixFormat> format_of(std::string_view option) {
  for (const auto& [name, format] : kFormats) {
    if (option == name) return format;
  }
  return std::nullopt;
}

// "NAME=N" with N from `low` to `high`.
std::optional<int64_t> value_of(std::string_view option, std::string_view name, int64_t low, int64_t high) {
  if (!option.starts_with(name) || option.substr(name.size(), 1) != "=") return std::nullopt;
  const std::string_view digits = option.substr(name.size() + 1);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || value < low || value > high)
    return std::nullopt;
  return value;
}

std::vector<std::string_view> split(std::string_view text, char by) {
  std::vector<std::string_view> parts;
  for (size_t end = text.find(by); end != std::string_view::npos; end = text.find(by)) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

}  // namespace

MatrixFormat synthetic_format(const std::string& model) {
  MatrixFormat format = MatrixFormat::kNvfp4;
  for (std::string_view option : split(model, ':')) format = format_of(option).value_or(format);
  return format;
}

Result<ModelSpec> synthetic_spec(const std::string& model) {
  NIBBLE_CHECK(is_synthetic(model));
  const std::vector<std::string_view> parts = split(model, ':');
  const auto* shapes = std::ranges::find_if(kModels, [&](const Shapes& s) { return s.name == parts[1]; });
  if (shapes == kModels.end()) {
    std::array<std::string_view, kModels.size()> names;
    std::ranges::transform(kModels, names.begin(), &Shapes::name);
    return user_error(
        "model '{}': there are {}{}, each with :layers=N, :experts=N and :format=nvfp4, q4 or bf16", model,
        kSyntheticPrefix, fmt::join(names, std::string(", ") + kSyntheticPrefix));
  }
  auto json = nlohmann::ordered_json::parse(shapes->config);
  auto& layers = json["num_hidden_layers"];
  auto& experts = json[shapes->experts_key];
  const int64_t most_layers = layers, chosen = json["num_experts_per_tok"], most_experts = experts;
  for (size_t i = 2; i < parts.size(); ++i) {
    if (const auto n = value_of(parts[i], "layers", 1, most_layers)) {
      layers = *n;
    } else if (const auto e = value_of(parts[i], "experts", chosen, most_experts)) {
      experts = *e;
    } else if (!format_of(parts[i])) {
      return user_error(
          "model '{}': '{}': wanted layers=N of 1 to {}, experts=N of {} to {}, or format=nvfp4, q4 or bf16",
          model, parts[i], most_layers, chosen, most_experts);
    }
  }
  if (shapes->sliding_heads > 0) {
    for (int64_t i = 0; i < layers; ++i) {
      const bool full = i % 4 == 0;
      json["layer_types"].push_back(full ? "full_attention" : "sliding_attention");
      json["num_attention_heads_per_layer"].push_back(full ? json["num_attention_heads"].get<int64_t>()
                                                           : shapes->sliding_heads);
    }
    // A single layer has no window, and nothing that is said of windows may be left over.
    if (layers == 1) json["rope_parameters"].erase("sliding_attention");
  }
  return spec_of(Config::of(std::move(json), model, {}));
}

}  // namespace nibble
