// The judge: every operation in plain scalar loops, float32 with dot products summed in float64, so that what
// a test measures is the other backend's error. Slow on purpose; threads only share rows.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace nibble {

// REQUIRES threads >= 1.
std::unique_ptr<Ops> make_reference_ops(int threads);

}  // namespace nibble
