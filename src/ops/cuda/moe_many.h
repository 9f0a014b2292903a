// Routed experts for many rows an expert, on wgmma: kernels for the two products, each a pass over an
// expert's weights for up to kManyRows of its rows. The bits are those of the kernel for few rows
// (moe_layer.cuh).
#pragma once

#include "ops/cuda/moe_workspace.h"

namespace nibble::cuda {

// Behind the kernel that groups, whose blocks have up to kManyRows rows. REQUIRES uses_many().
cudaError_t moe_many(const MoeDecodeArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace nibble::cuda
