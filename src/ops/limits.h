// Sizes that every backend takes; model/limits.h refuses configs beyond them. Constants alone, since the
// kernels of each instruction set include this.
#pragma once

#include <cstdint>

namespace nibble {

inline constexpr int64_t kMaxHeadDim = 1024;  // of a query or key: kernels keep a head on their stack
inline constexpr int64_t kMaxStreams = 16;    // of hyper-connections: kernels keep one of each in registers

}  // namespace nibble
