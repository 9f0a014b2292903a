#include "model/spec.h"

#include <array>

#include "model/families/families.h"

namespace nibble {
namespace {

struct Family {
  const char* model_type;
  ModelSpec (*read)(Config);
};

constexpr std::array kFamilies = {
    Family{"deepseek_v3", deepseek_v3_spec},
    Family{"glm4_moe", glm4_moe_spec},
    Family{"glm5_next", glm5_next_spec},
    Family{"gpt_oss", gpt_oss_spec},
    Family{"laguna", laguna_spec},
    Family{"llama", llama_spec},
    Family{"minimax_m2", minimax_m2_spec},
    Family{"mixtral", mixtral_spec},
    Family{"olmoe", olmoe_spec},
    Family{"qwen3", qwen3_spec},
    Family{"qwen3_moe", qwen3_moe_spec},
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

// Which weights are quantized, and how, is for the tensors to say (spec formats.md 2); but a method that is
// none of ours, or a rotation around the products, is better refused before anything is read.
void check_quantization(Config& config) {
  if (!config.has("quantization_config")) return;
  Config quantization = config.object("quantization_config");
  quantization.only("quant_method",
                    {"modelopt", "modelopt_fp4", "compressed-tensors", "mxfp4", "fp8", "nibble-q4"});
  quantization.only("transform_config", {nlohmann::ordered_json::object()});
  quantization.ignore_rest();
}

}  // namespace

Result<ModelSpec> spec_of(Config config) {
  std::string model_type = config.text("model_type");
  check_quantization(config);
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

Result<ModelSpec> load_spec(const FileSystem& files, const std::string& directory) {
  NIBBLE_ASSIGN_OR_RETURN(Config config, Config::load(files, directory));
  return spec_of(config);
}

Result<ModelSpec> parse_spec(std::string_view config_json, const std::string& name) {
  NIBBLE_ASSIGN_OR_RETURN(Config config, Config::parse(config_json, name));
  return spec_of(config);
}

}  // namespace nibble
