// The kernels for AVX2 with FMA and F16C. Only what kernels.h says may be included here: see its ODR note.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace nibble::cpu {
namespace {
#include "ops/cpu/vec_avx2.h"
// (the order is meant)
#include "ops/cpu/kernels.inc.h"
}  // namespace

const Kernels* kernels_avx2() {
  static constexpr Kernels kKernels = make_kernels("avx2");
  return &kKernels;
}

}  // namespace nibble::cpu
#else
namespace nibble::cpu {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace nibble::cpu
#endif
