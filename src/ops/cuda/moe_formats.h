// Which weights the tensor-core kernels (moe_decode.h, tile_linear.h) take.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "ops/ops.h"

namespace nibble::cuda {

enum class TensorCores { kYes, kOtherFormat, kNo };

// `shared_bytes` is the shared memory that a block can have on the device.
//
// Whether these experts of a layer (in host memory) can be repacked: kOtherFormat where the kernels are not
// made for their format, kNo where they are, but not for what the weights hold or for the device. `why` says
// what is in the way.
TensorCores tensor_cores_for(std::span<const ExpertWeights> experts, int64_t shared_bytes, std::string& why);

// Whether the device can run tile_linear.h; "", or why not.
std::string why_no_tiles(int64_t shared_bytes);
// Whether a matrix (in host memory) can be brought into the tiles of tile_linear.h on a device that can.
bool can_be_tiles(const Matrix& matrix);

}  // namespace nibble::cuda
