// The activation of the shared expert, beside what else the kernels of moe_decode() do.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/cuda/moe_decode.h"

namespace nibble::cuda {

// Every step-th element from `first` on, in place.
__device__ inline void activate_shared(const MoeDecodeArgs& a, int first, int step) {
  const SharedDown& s = a.shared;
  for (int i = first; i < a.tokens * s.width; i += step) {
    float* const gate = s.gate + i / s.width * s.gate_stride + i % s.width;
    *gate = activated(a.activation, *gate, s.up[i / s.width * s.up_stride + i % s.width]);
  }
}

}  // namespace nibble::cuda
