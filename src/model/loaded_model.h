// A model brought to a backend: what can step, without any text around it.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint/weight_source.h"
#include "model/decoder.h"
#include "ops/ops.h"
#include "ops/rounding_error.h"

namespace nibble {

// Members in the order in which later ones point into earlier ones.
struct LoadedModel {
  std::unique_ptr<Ops> ops;
  std::unique_ptr<WeightSource> weights;
  std::unique_ptr<Decoder> decoder;
  std::vector<RoundingError> rounding;  // of products with some of the weights, where the backend rounds
};

// Bytes that a model takes.
struct MemoryPlan {
  int64_t working = 0;  // KV cache, activations and what the backend's operations take for themselves
  int64_t copies = 0;   // weights in a form of the backend's own
  int64_t most = 0;     // that there are
};
enum class MemoryFit { kAll, kNotWeights, kNothing };
MemoryFit fit_of(const MemoryPlan& plan);

// `spec` is that of the files behind `weights`. What does not fit in memory is refused before anything
// large is read; weights that alone do not are used out of their mapped files where the backend can.
Result<LoadedModel> load_model(std::unique_ptr<WeightSource> weights, ModelSpec spec,
                               std::unique_ptr<Ops> ops, const DecoderOptions& options,
                               const LoadProgress& progress = {});

}  // namespace nibble
