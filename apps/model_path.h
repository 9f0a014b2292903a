// What -m may name: a directory, a GGUF file, a model in the Hugging Face cache, or a synthetic one.
#pragma once

#include <string>

#include "base/result.h"

namespace nibble {

// A directory, a *.gguf file and "synthetic:..." are themselves. "org/name" that is no directory is looked up
// under $HF_HOME/hub (else ~/.cache/huggingface/hub): the snapshot that refs/main names.
Result<std::string> find_model(const std::string& name);

// $NIBBLE_MOE_PATHS, or nibble/moe_paths.json in the user's cache.
std::string moe_paths_file();

}  // namespace nibble
