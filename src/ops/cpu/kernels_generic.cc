// The kernels for any machine, compiled with the build's own flags.
#include "ops/cpu/kernels.h"

namespace nibble::cpu {
namespace {
#include "ops/cpu/vec_generic.h"
// (the order is meant)
#include "ops/cpu/kernels.inc.h"
}  // namespace

const Kernels* kernels_generic() {
  static constexpr Kernels kKernels = make_kernels("generic");
  return &kKernels;
}

}  // namespace nibble::cpu
