// What the cuda backend computes with, in words: Ops::choices().
#pragma once

#include <string>
#include <vector>

#include "ops/cuda/device.h"

namespace nibble::cuda {

// `tensor_cores` and `graphs` as in CudaOptions. What is asked of the current device is said of it, whatever
// `device` is; without one it has no wgmma.
std::vector<std::string> choices(const Device& device, const std::string& tensor_cores, bool graphs);

}  // namespace nibble::cuda
