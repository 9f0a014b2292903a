#include "checkpoint/quantize_config.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/json.h"
#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;

using Json = nlohmann::ordered_json;

Json compressed_tensors_config(const QuantizePlan& plan) {
  const Json weights = {{"num_bits", 4},
                        {"type", "float"},
                        {"strategy", "group"},
                        {"group_size", quantize_group(plan.type)},
                        {"symmetric", true},
                        {"dynamic", false},
                        {"actorder", nullptr},
                        {"block_structure", nullptr},
                        {"observer", "minmax"},
                        {"observer_kwargs", Json::object()},
                        {"scale_dtype", "torch.uint8"},
                        {"zp_dtype", nullptr}};
  const Json group = {{"targets", {"Linear"}},
                      {"format", "mxfp4-pack-quantized"},
                      {"weights", weights},
                      {"input_activations", nullptr},
                      {"output_activations", nullptr}};
  return {{"quant_method", "compressed-tensors"}, {"format", "mxfp4-pack-quantized"},
          {"quantization_status", "compressed"},  {"config_groups", {{"group_0", group}}},
          {"kv_cache_scheme", nullptr},           {"ignore", plan.unquantized_modules}};
}

}  // namespace

Result<Json> read_source_config(const FileSystem& files, const std::string& directory) {
  const std::string path = join_path(directory, "config.json");
  if (!files.is_directory(directory)) return user_error("{}: no such directory", directory);
  if (!files.exists(path)) return user_error("{}: is missing; wanted a model directory", path);
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_text(files, path, kMaxConfigBytes));
  NIBBLE_ASSIGN_OR_RETURN(Json config, parse_json(text, path));
  if (!config.is_object()) return user_error("{}: wanted a JSON object", path);
  auto find_in = [&](const Json& object) -> Status {
    for (const char* key : {"quantization_config", "compression_config"}) {
      const auto at = object.find(key);
      if (at == object.end() || at->is_null()) continue;
      const bool named = at->is_object() && at->contains("quant_method") && (*at)["quant_method"].is_string();
      return user_error(
          "{}: already quantized: '{}' is there{}", path, key,
          named ? fmt::format(" (quant_method {})", quoted_name((*at)["quant_method"].get<std::string>()))
                : "");
    }
    return {};
  };
  NIBBLE_RETURN_IF_ERROR(find_in(config));
  if (const auto text_config = config.find("text_config");
      text_config != config.end() && text_config->is_object())
    NIBBLE_RETURN_IF_ERROR(find_in(*text_config));
  if (files.exists(join_path(directory, "hf_quant_config.json")))
    return user_error("{}: already quantized: it has hf_quant_config.json", directory);
  return config;
}

Json quantization_config(const QuantizePlan& plan) {
  switch (plan.type) {
    case QuantizeType::kNvfp4:
      return modelopt_config(plan.unquantized_modules, /*has_activation_scales=*/false);
    case QuantizeType::kMxfp4:
      if (!plan.gpt_oss) return compressed_tensors_config(plan);
      return {{"quant_method", "mxfp4"},
              {"modules_to_not_convert",
               {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}};
    case QuantizeType::kQ4:
      return {{"quant_method", "nibble-q4"},
              {"bits", 4},
              {"group_size", quantize_group(plan.type)},
              {"modules_to_not_convert", plan.unquantized_modules}};
  }
  NIBBLE_CHECK(false);
}

Json modelopt_config(const std::vector<std::string>& unquantized_modules, bool has_activation_scales) {
  return {{"quant_method", "modelopt"},
          {"quant_algo", has_activation_scales ? "NVFP4" : "W4A16_NVFP4"},
          {"kv_cache_quant_algo", nullptr},
          {"group_size", quantize_group(QuantizeType::kNvfp4)},
          {"exclude_modules", unquantized_modules}};
}

Json hf_quant_config(Json modelopt_config, const std::string& version) {
  modelopt_config.erase("quant_method");
  return {{"producer", {{"name", "nibble"}, {"version", version}}},
          {"quantization", std::move(modelopt_config)}};
}

}  // namespace nibble
