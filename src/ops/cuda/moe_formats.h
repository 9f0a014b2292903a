// Which weights the tensor-core kernels (moe_decode.h, tile_linear.h) take.
#pragma once

#include <span>
#include <string>

#include "ops/ops.h"

namespace nibble::cuda {

enum class TensorCores { kYes, kOtherFormat, kNo };

// Whether these experts of a layer (in host memory) can be repacked: kOtherFormat where the kernels are not
// made for their format, kNo where they are, but not for what the weights hold. `why` says what is in the
// way.
TensorCores tensor_cores_for(std::span<const ExpertWeights> experts, std::string& why);

// Whether a matrix (in host memory) can be brought into the tiles of tile_linear.h.
bool can_be_tiles(const Matrix& matrix);

}  // namespace nibble::cuda
