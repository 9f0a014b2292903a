// Which instruction sets' kernels this build and this machine have.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "ops/cpu/kernels.h"

namespace nibble::cpu {

// Those that can run here, best first; "generic" is always the last.
std::vector<const Kernels*> usable_kernels();

// By name ("avx512", "neon_dot", "generic"); "" is the best one.
Result<const Kernels*> find_kernels(const std::string& isa);

}  // namespace nibble::cpu
