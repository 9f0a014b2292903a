#include "ops/cpu/isa.h"

namespace nibble::cpu {
namespace {

#if defined(__x86_64__)
// The builtin looks at the operating system's support (XCR0) as well.
bool machine_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool machine_has_avx512() {
  return machine_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#else
bool machine_has_avx2() { return false; }
bool machine_has_avx512() { return false; }
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
  if (kernels_avx512() != nullptr && machine_has_avx512()) usable.push_back(kernels_avx512());
  if (kernels_avx2() != nullptr && machine_has_avx2()) usable.push_back(kernels_avx2());
  usable.push_back(kernels_generic());
  return usable;
}

Result<const Kernels*> find_kernels(const std::string& isa) {
  std::string names;
  for (const Kernels* kernels : usable_kernels()) {
    if (isa.empty() || isa == kernels->isa) return kernels;
    names += (names.empty() ? "" : ", ") + std::string(kernels->isa);
  }
  return user_error("cpu_isa '{}': this machine and build have: {}", isa, names);
}

}  // namespace nibble::cpu
