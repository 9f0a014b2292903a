// Grids of kernels that do something to each element of some rows.
#pragma once

#include <cstdint>

#include "base/numbers.h"

namespace nibble::cuda {

inline constexpr int kElementThreads = 256;

// A block for each row and each kElementThreads of its columns; rows are in x, which has room for 2^31.
inline dim3 element_grid(int64_t rows, int64_t cols) {
  return {static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(cols, kElementThreads))};
}
__device__ inline int64_t this_row() { return blockIdx.x; }
__device__ inline int64_t this_column() { return int64_t{blockIdx.y} * kElementThreads + threadIdx.x; }

}  // namespace nibble::cuda
