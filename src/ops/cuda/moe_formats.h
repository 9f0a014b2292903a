// Which weights the tensor-core kernels (moe_decode.h, tile_linear.h) take.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "ops/cuda/device.h"
#include "ops/cuda/moe_path.h"
#include "ops/ops.h"

namespace nibble::cuda {

// Why experts in this format cannot be repacked for the device and its paths, whatever they hold; "": they
// can.
std::string why_no_packing(MatrixFormat format, const Device& device, const MoePaths& paths);
// Why the experts of a layer (in host memory) cannot be; "": they can.
std::string why_not_packed(std::span<const ExpertWeights> experts, const Device& device,
                           const MoePaths& paths);

// Whether the device can run tile_linear.h; "", or why not.
std::string why_no_tiles(const Device& device);
// Why a matrix (in host memory) of a format that has_tiles() cannot be brought into them on a device that can
// do products with them; "": it can.
std::string why_not_tiles(const Matrix& matrix);

}  // namespace nibble::cuda
