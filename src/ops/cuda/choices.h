// What the cuda backend computes with, in words: Ops::choices().
#pragma once

#include <string>
#include <vector>

#include "ops/cuda/device.h"
#include "ops/cuda/moe_path.h"

namespace nibble::cuda {

// `tensor_cores` and `graphs` as in CudaOptions, `paths` as made of it. What is asked of the current device
// is said of it, whatever `device` is; without one it has no wgmma.
std::vector<std::string> choices(const Device& device, const std::string& tensor_cores, bool graphs,
                                 const MoePaths& paths = {});
// What follows the device in Ops::description(), if it is without tensor cores where they are wanted.
std::string without_tensor_cores(const Device& device, const std::string& tensor_cores);

}  // namespace nibble::cuda
