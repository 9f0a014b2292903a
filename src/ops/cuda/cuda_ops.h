// The cuda backend: activations, sums and states in float32 on one GPU. One stream; operations are launched
// and not waited for, copies of memory() from the device are.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "ops/ops.h"

namespace nibble {

struct CudaOptions {
  std::string tensor_cores, moe_path = "auto", moe_paths_file;  // of BackendOptions
  bool graphs = true;
};

// A user error where there is no GPU, or none that this build has kernels for.
Result<std::unique_ptr<Ops>> make_cuda_ops(const CudaOptions& options);

}  // namespace nibble
