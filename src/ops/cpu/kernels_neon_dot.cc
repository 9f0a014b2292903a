// The kernels for NEON with the dot product of bytes. Only what kernels.h says may be included here: see its
// ODR note.
#include "ops/cpu/kernels.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

namespace nibble::cpu {
namespace {
#include "ops/cpu/vec_neon.h"
// (the order is meant)
#include "ops/cpu/kernels.inc.h"
}  // namespace

const Kernels* kernels_neon_dot() {
  static constexpr Kernels kKernels = make_kernels("neon_dot");
  return &kKernels;
}

}  // namespace nibble::cpu
#else
namespace nibble::cpu {
const Kernels* kernels_neon_dot() { return nullptr; }
}  // namespace nibble::cpu
#endif
