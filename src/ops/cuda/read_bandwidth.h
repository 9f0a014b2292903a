// How fast the device reads its memory.
#pragma once

#include <cuda_runtime_api.h>

#include "base/result.h"
#include "ops/memory.h"

namespace nibble::cuda {

// Bytes a second; see Ops::read_bandwidth.
Result<double> read_bandwidth(Memory& memory, cudaStream_t stream, int multiprocessors);

}  // namespace nibble::cuda
