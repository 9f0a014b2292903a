// The kernels for AVX-512 with VNNI and BF16, and AMX with its tiles of bfloat16. Only what kernels.h
// says may be included here: see its ODR note.
#include "ops/cpu/kernels.h"

#if defined(__x86_64__)
// GCC 12 takes the undefined pass-through operand in its own intrinsics for a mistake (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

// Clang before 16 has a name of its own.
#if !defined(__AMX_BF16__) && !defined(__AMXBF16__)
#error "kernels_amx.cc is compiled without AMX"
#endif
#define NIBBLE_AMX

namespace nibble::cpu {
namespace {
#include "ops/cpu/vec_avx512.h"
// (the order is meant)
#include "ops/cpu/kernels.inc.h"
}  // namespace

const Kernels* kernels_amx() {
  static constexpr Kernels kKernels = make_kernels("amx");
  return &kKernels;
}

}  // namespace nibble::cpu
#else
namespace nibble::cpu {
const Kernels* kernels_amx() { return nullptr; }
}  // namespace nibble::cpu
#endif
