// The cuda backend: activations, sums and states in float32 on one GPU. One stream; operations are launched
// and not waited for, copies of memory() are.
#pragma once

#include <memory>

#include "base/result.h"
#include "ops/ops.h"

namespace nibble {

// A user error where there is no GPU, or none that this build has kernels for.
Result<std::unique_ptr<Ops>> make_cuda_ops();

}  // namespace nibble
