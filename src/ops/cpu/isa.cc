#include "ops/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nibble::cpu {
namespace {

#if defined(__x86_64__)
// clang 14 does not know this name in __builtin_cpu_supports.
bool machine_has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
// The builtin looks at the operating system's support (XCR0) as well.
bool machine_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && machine_has_f16c();
}
bool machine_has_avx512() {
  return machine_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool machine_has_avx512_vnni() { return machine_has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool machine_has_avx512_bf16() { return machine_has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
// The kernel keeps the tiles' 8 KB of a process that asks for them; threads that begin later have them too.
bool asks_for_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
bool machine_has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!machine_has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kBf16) == 0 || (edx & kTile) == 0) return false;
  static const bool permitted = asks_for_amx();
  return permitted;
}
#else
bool machine_has_avx2() { return false; }
bool machine_has_avx512() { return false; }
bool machine_has_avx512_vnni() { return false; }
bool machine_has_avx512_bf16() { return false; }
bool machine_has_amx() { return false; }
#endif

#if defined(__aarch64__) && defined(__linux__)
bool machine_has_neon_dot() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#else
bool machine_has_neon_dot() { return false; }
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
  if (kernels_amx() != nullptr && machine_has_amx()) usable.push_back(kernels_amx());
  if (kernels_avx512_bf16() != nullptr && machine_has_avx512_bf16()) usable.push_back(kernels_avx512_bf16());
  if (kernels_avx512_vnni() != nullptr && machine_has_avx512_vnni()) usable.push_back(kernels_avx512_vnni());
  if (kernels_avx512() != nullptr && machine_has_avx512()) usable.push_back(kernels_avx512());
  if (kernels_avx2() != nullptr && machine_has_avx2()) usable.push_back(kernels_avx2());
  if (kernels_neon_dot() != nullptr && machine_has_neon_dot()) usable.push_back(kernels_neon_dot());
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
