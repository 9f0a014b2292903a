// The metadata of a GGUF file as the config.json that the same model has elsewhere, so that one reader (the
// family's) knows what a model is. Keys and meanings: docs/formats-gguf.md.
#pragma once

#include "base/result.h"
#include "checkpoint/gguf.h"
#include "model/config.h"
#include "model/spec.h"

namespace nibble {

// Errors of the config name the keys of the file. Refused by key and value: other architectures, scalings of
// RoPE and routers than those implemented. Keys of the architecture that nobody knows are keys of the config
// under their own names.
Result<Config> gguf_config(const Gguf& gguf);

Result<ModelSpec> load_gguf_spec(const Gguf& gguf);

}  // namespace nibble
