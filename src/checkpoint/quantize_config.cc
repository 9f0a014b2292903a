#include "checkpoint/quantize_config.h"

#include <map>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;

using Json = nlohmann::ordered_json;

// W4A16_NVFP4 is ModelOpt's name for NVFP4 weights without activation scales; readers that find "NVFP4" wait
// for an input_scale of every matrix.
Json modelopt_fields(const QuantizePlan& plan) {
  return {{"quant_algo", "W4A16_NVFP4"},
          {"kv_cache_quant_algo", nullptr},
          {"group_size", quantize_group(plan.type)},
          {"exclude_modules", plan.unquantized_modules}};
}

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
    case QuantizeType::kNvfp4: {
      Json config = {{"quant_method", "modelopt"}};
      config.update(modelopt_fields(plan));
      return config;
    }
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

Json hf_quant_config(const QuantizePlan& plan, const std::string& version) {
  return {{"producer", {{"name", "nibble"}, {"version", version}}}, {"quantization", modelopt_fields(plan)}};
}

Json shard_index(const QuantizePlan& plan) {
  int64_t total_bytes = 0;
  std::map<std::string, std::string> weight_map;
  for (const ShardPlan& shard : plan.shards) {
    for (const TensorInfo& tensor : shard.tensors) {
      total_bytes += tensor.bytes;
      weight_map[tensor.name] = shard.file_name;
    }
  }
  return {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
}

}  // namespace nibble
