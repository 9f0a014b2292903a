// The cpu backend: threads and vectors. One algorithm (kernels.inc.h) compiled for each instruction set; the
// best one that this machine has is chosen at run time.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "ops/ops.h"

namespace nibble {

// `isa` as in BackendOptions::cpu_isa; one that this machine does not have is an error that names those that
// it has. `int8_activations` as BackendOptions::cpu_activations. REQUIRES threads >= 1.
Result<std::unique_ptr<Ops>> make_cpu_ops(int threads, const std::string& isa, bool int8_activations);

}  // namespace nibble
