// generation_config.json, or general.sampling.* of a GGUF file: what a model's makers want a user to get who
// asks for nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/gguf_metadata.h"
#include "engine/sampler.h"

namespace nibble {

struct GenerationConfig {
  SamplingParams sampling;          // over the built-in defaults
  std::vector<int32_t> end_tokens;  // beside those of config.json

  // DIRECTORY/generation_config.json; the built-in defaults where there is none.
  static Result<GenerationConfig> load(const FileSystem& files, const std::string& directory, int64_t vocab);
  // Of a GGUF file the spec has all end tokens.
  static Result<GenerationConfig> from_gguf(const GgufMetadata& metadata);
};

}  // namespace nibble
