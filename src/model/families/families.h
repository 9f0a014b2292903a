// The model families: one file each, from config.json to a ModelSpec.
#pragma once

#include "model/config.h"
#include "model/spec.h"

namespace nibble {

// What every family's config says in the same words: sizes, eps, vocabulary, ids, keys without effect on the
// result. `layers` has its final length and default entries.
ModelSpec read_common(Config& config);

// A family reads every key that matters, refuses by `config.only` what it does not implement, and leaves
// errors in config.status().
ModelSpec laguna_spec(Config config);

}  // namespace nibble
