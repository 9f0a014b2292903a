// What the cpu backend computes with, in words: Ops::choices().
#pragma once

#include <string>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/scratch.h"

namespace nibble::cpu {

// `asked`: the kernels were named; `makes_tiles`: matrices that can be tiles become some.
std::vector<std::string> choices(const Kernels& kernels, bool asked, Rounding rounding, bool makes_tiles);

}  // namespace nibble::cpu
