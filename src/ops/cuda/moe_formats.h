// Which weights the tensor-core kernels (moe_decode.h, tile_linear.h) take.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "ops/ops.h"

namespace nibble::cuda {

// Columns of a block scale.
constexpr int block_of(MatrixFormat format) { return format == MatrixFormat::kNvfp4 ? 16 : 32; }

// Why experts in this format cannot be repacked, whatever they hold; "": they can. `shared_bytes` as below.
std::string why_no_packing(MatrixFormat format, int64_t shared_bytes);
// Why the experts of a layer (in host memory) cannot be repacked; "": they can. `shared_bytes` is the shared
// memory that a block can have on the device.
std::string why_not_packed(std::span<const ExpertWeights> experts, int64_t shared_bytes);

// Whether the device can run tile_linear.h; "", or why not.
std::string why_no_tiles(int64_t shared_bytes);
// Why a matrix (in host memory) of a format that has_tiles() cannot be brought into them on a device that
// can;
// "": it can.
std::string why_not_tiles(const Matrix& matrix);

}  // namespace nibble::cuda
