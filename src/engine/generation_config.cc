#include "engine/generation_config.h"

#include <fmt/ranges.h>

#include "base/log.h"
#include "model/config.h"

namespace nibble {

Result<GenerationConfig> GenerationConfig::load(const FileSystem& files, const std::string& directory,
                                                int64_t vocab) {
  GenerationConfig result;
  if (!files.exists(join_path(directory, "generation_config.json"))) return result;
  NIBBLE_ASSIGN_OR_RETURN(Config config, Config::load(files, directory, "generation_config.json"));
  SamplingParams& p = result.sampling;
  p.temperature = static_cast<float>(config.number("temperature", 0, 100, p.temperature));
  p.top_k = static_cast<int32_t>(config.integer("top_k", 0, INT32_MAX, p.top_k));
  p.top_p = static_cast<float>(config.number("top_p", 0, 1, p.top_p));
  p.min_p = static_cast<float>(config.number("min_p", 0, 1, p.min_p));
  p.repeat_penalty = static_cast<float>(config.number("repetition_penalty", 0.01, 100, p.repeat_penalty));
  if (config.equals("do_sample", false)) p.temperature = 0;
  for (int64_t id : config.integer_or_list("eos_token_id", 0, vocab - 1)) {
    result.end_tokens.push_back(static_cast<int32_t>(id));
  }
  config.ignore({"bos_token_id", "pad_token_id", "transformers_version", "_from_model_config"});
  if (const std::vector<std::string> unread = config.unread(); !unread.empty()) {
    log_debug("{}: keys without effect here: {}", config.name(), fmt::join(unread, ", "));
  }
  NIBBLE_RETURN_IF_ERROR(config.status());
  return result;
}

Result<GenerationConfig> GenerationConfig::from_gguf(const GgufMetadata& metadata) {
  GenerationConfig result;
  SamplingParams& p = result.sampling;
  const auto read = [&](const char* key, double low, double high, float& value) -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const double number, metadata.number(key, value));
    if (number < low || number > high)
      return metadata.wrong(key, fmt::format("a value in [{}, {}]", low, high));
    value = static_cast<float>(number);
    return {};
  };
  NIBBLE_RETURN_IF_ERROR(read("general.sampling.temp", 0, 100, p.temperature));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t top_k,
                          metadata.integer("general.sampling.top_k", 0, INT32_MAX, p.top_k));
  p.top_k = static_cast<int32_t>(top_k);
  NIBBLE_RETURN_IF_ERROR(read("general.sampling.top_p", 0, 1, p.top_p));
  NIBBLE_RETURN_IF_ERROR(read("general.sampling.min_p", 0, 1, p.min_p));
  NIBBLE_RETURN_IF_ERROR(read("general.sampling.penalty_repeat", 0.01, 100, p.repeat_penalty));
  return result;
}

}  // namespace nibble
