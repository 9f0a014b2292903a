// What a GGUF file says of text, as the small files of a model directory.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/result.h"
#include "checkpoint/gguf_metadata.h"

namespace nibble {

// {"bos_token": "<s>", ...}: as tokenizer_config.json and a chat template call them.
Result<nlohmann::ordered_json> gguf_special_tokens(const GgufMetadata& metadata);

// tokenizer.json, tokenizer_config.json with the chat template, and generation_config.json. A tokenizer that
// has no tokenizer.json is left out with a warning.
Status write_text_files(const GgufMetadata& metadata, const std::string& directory);

}  // namespace nibble
