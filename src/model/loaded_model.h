// A model brought to a backend: what can step, without any text around it.
#pragma once

#include <memory>

#include "checkpoint/weight_source.h"
#include "model/decoder.h"
#include "ops/ops.h"

namespace nibble {

// Members in the order in which later ones point into earlier ones.
struct LoadedModel {
  std::unique_ptr<Ops> ops;
  std::unique_ptr<WeightSource> weights;
  std::unique_ptr<Decoder> decoder;
};

// `spec` is that of the files behind `weights`. The memory of KV cache and activations is checked to be
// plannable before anything large is read.
Result<LoadedModel> load_model(std::unique_ptr<WeightSource> weights, ModelSpec spec,
                               std::unique_ptr<Ops> ops, const DecoderOptions& options,
                               const LoadProgress& progress = {});

}  // namespace nibble
