// generation_config.json: what a model's makers want a user to get who asks for nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "engine/sampler.h"

namespace nibble {

struct GenerationConfig {
  SamplingParams sampling;          // over the built-in defaults
  std::vector<int32_t> end_tokens;  // beside those of config.json

  // DIRECTORY/generation_config.json; the built-in defaults where there is none.
  static Result<GenerationConfig> load(const FileSystem& files, const std::string& directory, int64_t vocab);
};

}  // namespace nibble
