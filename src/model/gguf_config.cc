#include "model/gguf_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>

#include "model/limits.h"

namespace nibble {
namespace {

using Json = nlohmann::ordered_json;

// A key of the metadata (behind "ARCH.") and the key of config.json that says the same.
struct KeyPair {
  const char* gguf;
  const char* config;
};

constexpr std::array kCommonKeys = {
    KeyPair{"context_length", "max_position_embeddings"},
    KeyPair{"embedding_length", "hidden_size"},
    KeyPair{"feed_forward_length", "intermediate_size"},
    KeyPair{"attention.head_count_kv", "num_key_value_heads"},
    KeyPair{"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    KeyPair{"expert_used_count", "num_experts_per_tok"},
};

// The factor that gives `dim` of `of` in a reader that multiplies and drops the fraction.
double partial_factor(int64_t dim, int64_t of) {
  const double factor = static_cast<double>(dim) / static_cast<double>(of);
  const auto got = static_cast<int64_t>(static_cast<double>(of) * factor);
  return got == dim ? factor : std::nextafter(factor, 2.0);
}

class Translator {
 public:
  explicit Translator(const Gguf& gguf) : gguf_(gguf), metadata_(gguf.metadata()) {}

  Result<Config> translate() {
    NIBBLE_RETURN_IF_ERROR(only_text("general.type", {"model"}));
    NIBBLE_ASSIGN_OR_RETURN(arch_, metadata_.text("general.architecture"));
    using Family = Status (Translator::*)();
    constexpr std::pair<const char*, Family> kFamilies[] = {
        {"glm4moe", &Translator::glm4moe}, {"gpt-oss", &Translator::gpt_oss},
        {"laguna", &Translator::laguna},   {"llama", &Translator::llama},
        {"qwen3", &Translator::qwen3},     {"qwen3moe", &Translator::qwen3moe}};
    std::string known;
    for (const auto& [arch, family] : kFamilies) {
      known += std::string(known.empty() ? "" : ", ") + arch;
      if (arch_ != arch) continue;
      NIBBLE_RETURN_IF_ERROR(common());
      NIBBLE_RETURN_IF_ERROR((this->*family)());
      NIBBLE_RETURN_IF_ERROR(pass_on_unknown_keys());
      return Config::of(std::move(config_), metadata_.name(), std::move(shown_));
    }
    return user_error("{}: metadata 'general.architecture' = '{}' is not implemented; implemented: {}",
                      metadata_.name(), arch_, known);
  }

 private:
  std::string key(const std::string& suffix) const { return arch_ + "." + suffix; }
  bool has(const std::string& suffix) const { return metadata_.has(key(suffix)); }
  bool has_tensor(const std::string& name) const { return gguf_.has(name); }

  // These mark a key as known.
  Result<int64_t> integer(const std::string& suffix, int64_t low, int64_t high,
                          std::optional<int64_t> otherwise = {}) {
    used_.insert(key(suffix));
    return metadata_.integer(key(suffix), low, high, otherwise);
  }
  Result<double> number(const std::string& suffix, std::optional<double> otherwise = {}) {
    used_.insert(key(suffix));
    return metadata_.number(key(suffix), otherwise);
  }
  Result<std::string> text(const std::string& suffix, const std::string& otherwise) {
    used_.insert(key(suffix));
    return metadata_.text(key(suffix), otherwise);
  }
  Status only_text(const std::string& full_key, std::initializer_list<std::string_view> implemented) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string value,
                            metadata_.text(full_key, std::string(*implemented.begin())));
    if (std::find(implemented.begin(), implemented.end(), value) != implemented.end()) return {};
    return metadata_.wrong(
        full_key, fmt::format("one of {} (others are not implemented)", fmt::join(implemented, ", ")));
  }

  // One number, text or boolean as JSON. A float32 gets the shortest decimal that means it.
  Result<Json> scalar(const std::string& full_key) const {
    const GgufValue& value = *metadata_.find(full_key);
    if (value.is_array) return metadata_.wrong(full_key, "a single value");
    switch (value.type) {
      case GgufValueType::kF32: {
        NIBBLE_ASSIGN_OR_RETURN(const double number, metadata_.number(full_key));
        return Json(std::stod(fmt::format("{}", static_cast<float>(number))));
      }
      case GgufValueType::kF64: {
        NIBBLE_ASSIGN_OR_RETURN(const double number, metadata_.number(full_key));
        return Json(number);
      }
      case GgufValueType::kBool: {
        NIBBLE_ASSIGN_OR_RETURN(const bool truth, metadata_.boolean(full_key));
        return Json(truth);
      }
      case GgufValueType::kString: {
        NIBBLE_ASSIGN_OR_RETURN(std::string text, metadata_.text(full_key));
        return Json(std::move(text));
      }
      default: {
        NIBBLE_ASSIGN_OR_RETURN(const int64_t integer, metadata_.integer(full_key, INT64_MIN, INT64_MAX));
        return Json(integer);
      }
    }
  }

  // config[name] = the value of a key, where it is there.
  Status copy(Json& config, const std::string& suffix, const std::string& path) {
    used_.insert(key(suffix));
    shown_[path] = key(suffix);
    if (!has(suffix)) return {};
    NIBBLE_ASSIGN_OR_RETURN(config[path.substr(path.rfind('.') + 1)], scalar(key(suffix)));
    return {};
  }
  Status copy(const std::string& suffix, const std::string& name) { return copy(config_, suffix, name); }

  Status common() {
    for (const KeyPair& pair : kCommonKeys) NIBBLE_RETURN_IF_ERROR(copy(pair.gguf, pair.config));
    NIBBLE_ASSIGN_OR_RETURN(layers_, integer("block_count", 1, limits::kLayers));
    config_["num_hidden_layers"] = layers_;
    shown_["num_hidden_layers"] = key("block_count");
    NIBBLE_RETURN_IF_ERROR(vocabulary());
    NIBBLE_RETURN_IF_ERROR(heads());
    config_["tie_word_embeddings"] = !has_tensor("output.weight");
    return {};
  }

  Status vocabulary() {
    NIBBLE_RETURN_IF_ERROR(copy("vocab_size", "vocab_size"));
    if (!config_.contains("vocab_size")) {
      const GgufValue* tokens = metadata_.find("tokenizer.ggml.tokens");
      if (tokens == nullptr || !tokens->is_array)
        return user_error("{}: metadata '{}' is missing, and so are the tokens", metadata_.name(),
                          key("vocab_size"));
      config_["vocab_size"] = tokens->count;
      shown_["vocab_size"] = "tokenizer.ggml.tokens";
    }
    std::set<int64_t> ends;
    for (const char* name : {"eos", "eot", "eom"}) {
      const std::string id_key = fmt::format("tokenizer.ggml.{}_token_id", name);
      if (!metadata_.has(id_key)) continue;
      NIBBLE_ASSIGN_OR_RETURN(const int64_t id, metadata_.integer(id_key, 0, limits::kVocab));
      ends.insert(id);
      shown_["eos_token_id"] = id_key;
    }
    if (!ends.empty()) config_["eos_token_id"] = ends;
    return {};
  }

  // Head counts and the head dim, which values have too.
  Status heads() {
    const std::string counts = key("attention.head_count");
    used_.insert(counts);
    NIBBLE_ASSIGN_OR_RETURN(head_counts_, metadata_.integer_each(counts, layers_, 1, limits::kHeads));
    config_["num_attention_heads"] = head_counts_.front();
    shown_["num_attention_heads"] = counts;
    NIBBLE_ASSIGN_OR_RETURN(const int64_t width,
                            metadata_.integer(key("embedding_length"), 1, limits::kWidth));
    NIBBLE_ASSIGN_OR_RETURN(head_dim_, integer("attention.key_length", 2, limits::kHeadDim,
                                               std::max<int64_t>(width / head_counts_.front(), 2)));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t value_dim,
                            integer("attention.value_length", 1, INT32_MAX, head_dim_));
    if (value_dim != head_dim_) {
      return metadata_.wrong(key("attention.value_length"),
                             fmt::format("{}, as keys have (others are not implemented)", head_dim_));
    }
    config_["head_dim"] = head_dim_;
    shown_["head_dim"] = key("attention.key_length");
    return {};
  }

  // All layers are alike but where a family says otherwise.
  Status same_heads() const {
    const bool same = std::all_of(head_counts_.begin(), head_counts_.end(),
                                  [&](int64_t count) { return count == head_counts_.front(); });
    return same ? Status()
                : metadata_.wrong(key("attention.head_count"),
                                  "the same in all layers (others are not implemented)");
  }

  // theta and the dims that rotate. `swa`: "_swa" for sliding layers where they have their own.
  Result<Json> rope(const std::string& path, const std::string& swa = "") {
    Json rope = {{"rope_type", "default"}};
    const std::string base = has("rope.freq_base" + swa) ? "rope.freq_base" + swa : "rope.freq_base";
    NIBBLE_RETURN_IF_ERROR(copy(rope, base, path + ".rope_theta"));
    if (!rope.contains("rope_theta")) rope["rope_theta"] = 10000.0;
    const std::string dims =
        has("rope.dimension_count" + swa) ? "rope.dimension_count" + swa : "rope.dimension_count";
    NIBBLE_ASSIGN_OR_RETURN(const int64_t rotary_dim, integer(dims, 2, head_dim_, head_dim_));
    rope["partial_rotary_factor"] = partial_factor(rotary_dim, head_dim_);
    shown_[path + ".partial_rotary_factor"] = key(dims);
    return rope;
  }

  Status scaling(const std::string& path, Json& rope) {
    const std::string at = "rope.scaling.";
    NIBBLE_ASSIGN_OR_RETURN(const std::string type, text(at + "type", "none"));
    if (type == "none") return {};
    if (type != "yarn")
      return metadata_.wrong(key(at + "type"), "one of none, yarn (others are not implemented)");
    rope["rope_type"] = "yarn";
    NIBBLE_RETURN_IF_ERROR(copy(rope, at + "factor", path + ".factor"));
    NIBBLE_RETURN_IF_ERROR(
        copy(rope, at + "original_context_length", path + ".original_max_position_embeddings"));
    NIBBLE_RETURN_IF_ERROR(copy(rope, at + "yarn_beta_fast", path + ".beta_fast"));
    NIBBLE_RETURN_IF_ERROR(copy(rope, at + "yarn_beta_slow", path + ".beta_slow"));
    NIBBLE_ASSIGN_OR_RETURN(const double ext, number(at + "yarn_ext_factor", 1.0));
    if (ext != 1) return metadata_.wrong(key(at + "yarn_ext_factor"), "1 (others are not implemented)");
    // Some writers mean the whole factor on cos and sin, some what it is multiplied by: only where both mean
    // the same, YaRN's own 0.1 ln(factor) + 1, is it known what the model wants.
    NIBBLE_ASSIGN_OR_RETURN(const double factor, number(at + "factor", 1.0));
    const double own = factor > 1 ? 0.1 * std::log(factor) + 1 : 1;
    NIBBLE_ASSIGN_OR_RETURN(const double attention, number(at + "yarn_attn_factor", 1.0));
    if (attention == 1 || std::fabs(attention - own) < 1e-5 * own) return {};
    return metadata_.wrong(key(at + "yarn_attn_factor"),
                           fmt::format("1 or {:.6g} (others are not implemented)", own));
  }

  // The RoPE of a model whose layers have one.
  Status one_rope(bool truncate = true) {
    const std::string path = "rope_parameters";
    NIBBLE_ASSIGN_OR_RETURN(Json parameters, rope(path));
    NIBBLE_RETURN_IF_ERROR(scaling(path, parameters));
    if (!truncate && parameters["rope_type"] == "yarn") parameters["truncate"] = false;
    config_[path] = std::move(parameters);
    return {};
  }

  void attention_bias() { config_["attention_bias"] = has_tensor("blk.0.attn_q.bias"); }

  // Layers as the period or the list of booleans (true: sliding) of sliding_window_pattern says; in a period
  // the layer at `full` is the full one. Without a window all are full.
  Result<std::vector<std::string>> layer_types(int64_t period, int64_t full) {
    std::vector<std::string> types(static_cast<size_t>(layers_), "full_attention");
    const std::string window = "attention.sliding_window", pattern = "attention.sliding_window_pattern";
    used_.insert(key(pattern));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t positions, integer(window, 0, limits::kPositions, 0));
    if (positions == 0) return types;
    config_["sliding_window"] = positions;
    const GgufValue* value = metadata_.find(key(pattern));
    std::vector<bool> slides;
    if (value != nullptr && value->is_array) {
      NIBBLE_ASSIGN_OR_RETURN(slides, metadata_.booleans(key(pattern)));
      if (std::ssize(slides) != layers_)
        return metadata_.wrong(key(pattern), fmt::format("one boolean for each of {} layers", layers_));
    } else {
      NIBBLE_ASSIGN_OR_RETURN(period, metadata_.integer(key(pattern), 1, limits::kLayers, period));
      for (int64_t i = 0; i < layers_; ++i) slides.push_back(i % period != full % period);
    }
    for (size_t i = 0; i < types.size(); ++i) {
      if (slides[i]) types[i] = "sliding_attention";
    }
    return types;
  }

  // expert_gating_func, of which a family takes some: numbers and what its config calls them.
  Result<std::string> gating(std::initializer_list<std::pair<int64_t, const char*>> implemented) {
    const std::string name = "expert_gating_func";
    NIBBLE_ASSIGN_OR_RETURN(const int64_t value, integer(name, 0, INT32_MAX, implemented.begin()->first));
    std::string known;
    for (const auto& [number, config_name] : implemented) {
      if (value == number) return std::string(config_name);
      known += fmt::format("{}{} ({})", known.empty() ? "" : ", ", number, config_name);
    }
    return metadata_.wrong(key(name), known + "; others are not implemented");
  }

  Status llama() {
    NIBBLE_RETURN_IF_ERROR(same_heads());
    NIBBLE_ASSIGN_OR_RETURN(const int64_t experts, integer("expert_count", 0, limits::kExperts, 0));
    if (experts > 0) {
      config_["num_local_experts"] = experts;
      shown_["num_local_experts"] = key("expert_count");
    } else {
      config_.erase("num_experts_per_tok");
      attention_bias();
    }
    config_["model_type"] = experts > 0 ? "mixtral" : "llama";
    // The rows of q and k are in the order in which neighbours turn together, of whole heads: of a part of
    // one it is not known which rows a writer has moved.
    const std::string dims = "rope.dimension_count";
    NIBBLE_ASSIGN_OR_RETURN(const int64_t rotary_dim, integer(dims, 2, INT32_MAX, head_dim_));
    if (rotary_dim != head_dim_)
      return metadata_.wrong(key(dims),
                             fmt::format("{}, a whole head (others are not implemented)", head_dim_));
    config_["rope_interleaved"] = true;
    return one_rope();
  }

  Status qwen3() {
    NIBBLE_RETURN_IF_ERROR(same_heads());
    config_["model_type"] = "qwen3";
    attention_bias();
    return one_rope();
  }

  Status qwen3moe() {
    NIBBLE_RETURN_IF_ERROR(same_heads());
    config_["model_type"] = "qwen3_moe";
    config_["norm_topk_prob"] = true;
    attention_bias();
    NIBBLE_RETURN_IF_ERROR(copy("expert_count", "num_experts"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_feed_forward_length", "moe_intermediate_size"));
    if (!has("expert_feed_forward_length")) {
      NIBBLE_ASSIGN_OR_RETURN(const int64_t width, integer("feed_forward_length", 1, limits::kWidth));
      NIBBLE_ASSIGN_OR_RETURN(const int64_t chosen, integer("expert_used_count", 1, limits::kExperts));
      config_["moe_intermediate_size"] = width / chosen;
    }
    return one_rope();
  }

  Status gpt_oss() {
    NIBBLE_RETURN_IF_ERROR(same_heads());
    config_["model_type"] = "gpt_oss";
    NIBBLE_RETURN_IF_ERROR(copy("expert_count", "num_local_experts"));
    if (has("expert_feed_forward_length"))
      NIBBLE_RETURN_IF_ERROR(copy("expert_feed_forward_length", "intermediate_size"));
    NIBBLE_ASSIGN_OR_RETURN(config_["layer_types"], layer_types(2, 1));
    NIBBLE_RETURN_IF_ERROR(gating({{3, "softmax of the chosen"}}).status());
    return one_rope(/*truncate=*/false);
  }

  Status glm4moe() {
    NIBBLE_RETURN_IF_ERROR(same_heads());
    NIBBLE_ASSIGN_OR_RETURN(const int64_t next, integer("nextn_predict_layers", 0, 16, 0));
    if (next >= layers_) {
      return metadata_.wrong(key("nextn_predict_layers"),
                             fmt::format("fewer than the {} layers of block_count", layers_));
    }
    config_["num_hidden_layers"] = layers_ - next;
    config_["num_nextn_predict_layers"] = next;
    config_["model_type"] = "glm4_moe";
    config_["use_qk_norm"] = has_tensor("blk.0.attn_q_norm.weight");
    attention_bias();
    NIBBLE_ASSIGN_OR_RETURN(config_["scoring_func"], gating({{2, "sigmoid"}}));
    NIBBLE_RETURN_IF_ERROR(copy("expert_count", "n_routed_experts"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_feed_forward_length", "moe_intermediate_size"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_shared_count", "n_shared_experts"));
    NIBBLE_RETURN_IF_ERROR(copy("leading_dense_block_count", "first_k_dense_replace"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_weights_norm", "norm_topk_prob"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_weights_scale", "routed_scaling_factor"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_group_count", "n_group"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_group_used_count", "topk_group"));
    return one_rope();
  }

  Status laguna() {
    config_["model_type"] = "laguna";
    config_["num_attention_heads_per_layer"] = head_counts_;
    shown_["num_attention_heads_per_layer"] = key("attention.head_count");
    const GgufTensorInfo* gate = gguf_.info("blk.0.attn_gate.weight");
    config_["gating"] =
        gate != nullptr && gate->shape.front() != head_counts_.front() ? "per-element" : "per-head";
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> types, layer_types(4, 0));
    config_["layer_types"] = types;

    Json& ropes = config_["rope_parameters"] = Json::object();
    const std::string full = "rope_parameters.full_attention", sliding = "rope_parameters.sliding_attention";
    NIBBLE_ASSIGN_OR_RETURN(Json full_rope, rope(full));
    NIBBLE_RETURN_IF_ERROR(scaling(full, full_rope));
    ropes["full_attention"] = std::move(full_rope);
    // Known where no layer slides, too.
    NIBBLE_ASSIGN_OR_RETURN(Json sliding_rope, rope(sliding, "_swa"));
    if (std::find(types.begin(), types.end(), "sliding_attention") != types.end())
      ropes["sliding_attention"] = std::move(sliding_rope);

    NIBBLE_ASSIGN_OR_RETURN(config_["moe_router_score_func"], gating({{2, "sigmoid"}, {4, "sqrtsoftplus"}}));
    NIBBLE_RETURN_IF_ERROR(copy("expert_count", "num_experts"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_feed_forward_length", "moe_intermediate_size"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_weights_norm", "norm_topk_prob"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_weights_scale", "moe_routed_scaling_factor"));
    NIBBLE_RETURN_IF_ERROR(copy("expert_shared_feed_forward_length", "shared_expert_intermediate_size"));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t shared, integer("expert_shared_count", 0, 64, 1));
    if (!has("expert_shared_feed_forward_length")) {
      NIBBLE_ASSIGN_OR_RETURN(const int64_t width, integer("expert_feed_forward_length", 1, limits::kWidth));
      config_["shared_expert_intermediate_size"] = width * shared;
    }
    NIBBLE_ASSIGN_OR_RETURN(const int64_t dense, integer("leading_dense_block_count", 0, layers_, 0));
    std::vector<std::string> mlps(static_cast<size_t>(layers_), "sparse");
    std::fill_n(mlps.begin(), dense, "dense");
    config_["mlp_layer_types"] = mlps;
    return {};
  }

  // The reader of the config refuses those that sound like arithmetic and warns of the others.
  Status pass_on_unknown_keys() {
    for (const auto& [name, value] : metadata_.values()) {
      if (!name.starts_with(arch_ + ".") || used_.contains(name)) continue;
      if (value.is_array) {
        config_[name] = describe(value);
      } else {
        NIBBLE_ASSIGN_OR_RETURN(config_[name], scalar(name));
      }
    }
    return {};
  }

  const Gguf& gguf_;
  const GgufMetadata& metadata_;
  std::string arch_;
  std::set<std::string> used_;  // full keys
  Json config_ = Json::object();
  std::map<std::string, std::string> shown_;  // dotted path in config_ -> full key
  int64_t layers_ = 0, head_dim_ = 0;
  std::vector<int64_t> head_counts_;  // of each layer
};

}  // namespace

Result<Config> gguf_config(const Gguf& gguf) { return Translator(gguf).translate(); }

Result<ModelSpec> load_gguf_spec(const Gguf& gguf) {
  NIBBLE_ASSIGN_OR_RETURN(Config config, gguf_config(gguf));
  NIBBLE_ASSIGN_OR_RETURN(ModelSpec spec, spec_of(std::move(config)));
  spec.names.rope_divisors = "rope_freqs.weight";
  return spec;
}

}  // namespace nibble
