#include "model/spec.h"

#include <array>

#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {
namespace {

struct Family {
  const char* model_type;
  ModelSpec (*read)(Config);
};

constexpr std::array kFamilies = {
    Family{"laguna", laguna_spec},
};

// A key that no family reads may be bookkeeping, or a misspelt or newer switch of the forward pass, and then
// every answer would be fluent nonsense. Names that sound like the latter are refused, the others are a
// warning.
Status refuse_what_sounds_like_arithmetic(const std::string& file, const ModelSpec& spec) {
  for (const std::string& key : spec.ignored_config_keys) {
    for (const char* part :
         {"rope",  "rotary", "theta", "scal", "soft",   "clip", "norm",   "bias", "attention", "attn",
          "layer", "expert", "moe",   "head", "window", "gate", "gating", "act",  "hidden",    "router"}) {
      if (key.find(part) == std::string::npos) continue;
      return user_error(
          "{}: key '{}' is unknown to model_type '{}' and may change the result; if it does not, remove it",
          file, key, spec.family);
    }
  }
  return {};
}

Result<ModelSpec> spec_of(Config config) {
  std::string model_type = config.text("model_type");
  NIBBLE_RETURN_IF_ERROR(config.status());
  std::string known;
  for (const Family& family : kFamilies) {
    known += std::string(known.empty() ? "" : ", ") + family.model_type;
    if (model_type != family.model_type) continue;
    ModelSpec spec = family.read(config);
    NIBBLE_RETURN_IF_ERROR(config.status());
    spec.family = model_type;
    spec.ignored_config_keys = config.unread();
    NIBBLE_RETURN_IF_ERROR(refuse_what_sounds_like_arithmetic(config.name(), spec));
    return spec;
  }
  return user_error("{}: key 'model_type' = '{}' is not implemented; implemented: {}", config.name(),
                    model_type, known);
}

}  // namespace

ModelSpec read_common(Config& config) {
  ModelSpec spec;
  spec.width = config.integer("hidden_size", 1, limits::kWidth);
  spec.vocab = config.integer("vocab_size", 1, limits::kVocab);
  spec.layers.resize(static_cast<size_t>(config.integer("num_hidden_layers", 1, limits::kLayers)));
  spec.max_positions = config.integer("max_position_embeddings", 1, limits::kPositions);
  spec.norm_eps = static_cast<float>(config.number("rms_norm_eps", 0, 1));
  spec.tied_head = config.boolean("tie_word_embeddings", false);
  if (config.has("bos_token_id"))
    config.integer("bos_token_id", 0, spec.vocab - 1);  // the tokenizer adds it where the model wants it
  for (int64_t id : config.integer_or_list("eos_token_id", 0, spec.vocab - 1)) {
    spec.eos.push_back(static_cast<int32_t>(id));
  }
  config.ignore({"architectures", "model_type", "bos_token_id", "pad_token_id", "dtype", "torch_dtype",
                 "transformers_version", "use_cache", "initializer_range", "attention_dropout",
                 "output_router_logits", "router_aux_loss_coef", "quantization_config", "auto_map",
                 "_name_or_path"});
  return spec;
}

Result<ModelSpec> load_spec(const FileSystem& files, const std::string& directory) {
  NIBBLE_ASSIGN_OR_RETURN(Config config, Config::load(files, directory));
  return spec_of(config);
}

Result<ModelSpec> parse_spec(std::string_view config_json, const std::string& name) {
  NIBBLE_ASSIGN_OR_RETURN(Config config, Config::parse(config_json, name));
  return spec_of(config);
}

}  // namespace nibble
