// The cpu backend: threads and vectors. One algorithm (kernels.inc.h) compiled for each instruction set; the
// best one that this machine has is chosen at run time.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace nibble {

// REQUIRES threads >= 1.
std::unique_ptr<Ops> make_cpu_ops(int threads);

}  // namespace nibble
