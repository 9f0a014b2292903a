// A model directory brought to a backend: what can step, without any text around it.
#pragma once

#include <memory>
#include <string>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/checkpoint.h"
#include "model/decoder.h"
#include "ops/ops.h"

namespace nibble {

// Members in the order in which later ones point into earlier ones.
struct LoadedModel {
  std::unique_ptr<Ops> ops;
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<Decoder> decoder;
};

// `spec` is that of `directory`. The memory of KV cache and activations is checked to be plannable before
// anything large is read.
Result<LoadedModel> load_model(const FileSystem& files, const std::string& directory, ModelSpec spec,
                               std::unique_ptr<Ops> ops, const DecoderOptions& options,
                               const LoadProgress& progress = {});

}  // namespace nibble
