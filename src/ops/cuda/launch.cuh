// Grids of kernels that do something to each element of some rows, and launches that overlap.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/numbers.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/primitives.cuh"

namespace nibble::cuda {

// Whether kernels wait themselves for those before them; else they must not be started early.
inline bool kernels_wait() {
  static const bool do_wait = [] {
    int compiled_for = 0;
    return find_kernels(compiled_for) == cudaSuccess && compiled_for >= kHopper;
  }();
  return do_wait;
}

// Launches a kernel that may start while the one before it still ends (programmatic dependent launch), which
// hides most of what a launch takes. Before the kernel reads what a kernel before it may have written, or
// writes anything, it MUST call after_kernel_before(), or dependency_wait() itself, and so must a block of
// each grid. A kernel that is launched in the ordinary way waits for all before it, these too. cluster:
// blocks that run together.
template <class... P, class... A>
void launch_early_clusters(void (*kernel)(P...), dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes,
                           cudaStream_t stream, const A&... args) {
  cudaLaunchAttribute attributes[2] = {};
  if (kernels_wait()) {  // else cudaLaunchAttributeIgnore
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
  }
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, P(args)...);  // check_launch() tells a failure
}
template <class... P, class... A>
void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                  const A&... args) {
  launch_early_clusters(kernel, grid, block, 1, shared_bytes, stream, args...);
}
// Lets the next kernel start, and waits until all that the kernels before wrote is there.
__device__ inline void after_kernel_before() {
  dependency_launch();
  dependency_wait();
}

inline constexpr int kElementThreads = 256;

// A block for each row and each kElementThreads of its columns; rows are in x, which has room for 2^31.
inline dim3 element_grid(int64_t rows, int64_t cols) {
  return {static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(cols, kElementThreads))};
}
__device__ inline int64_t this_row() { return blockIdx.x; }
__device__ inline int64_t this_column() { return int64_t{blockIdx.y} * kElementThreads + threadIdx.x; }

}  // namespace nibble::cuda
