// The PTX that the kernels use, under names. Nothing else but wgmma.cuh holds inline assembly in this tree.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// Devices of compute capability 9.0 or later have what the kernels of weights on tensor cores are made of:
// bulk copies, mbarriers that count bytes. (Attention takes what 8.0 has.) In code for older ones these
// kernels are empty, and nobody launches them (moe_formats.h); the others do without programmatic dependent
// launch. Kernels ask by the macro, the host by kHopper (kernels.h).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define NIBBLE_HOPPER_OR_LATER
#endif

namespace nibble::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// mbarrier of so many arrivals a phase (with the bytes that are to come, if any); the phase is complete once
// those are there.
__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes barrier_init visible to the copy engine.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;"); }
__device__ inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// A warp is done with what a barrier guards: one arrival of lane 0 behind all lanes' accesses. racecheck does
// not follow that order through __syncwarp; built for it (NIBBLE_RACECHECK) every lane arrives, which is 5%
// slower.
#ifdef NIBBLE_RACECHECK
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif
__device__ inline void warp_arrive(uint64_t* barrier) {
  if constexpr (kWarpArrivals == 1) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  } else {
    barrier_arrive(barrier);
  }
}
// Whether the phase of that parity is complete; may wait for a while.
__device__ inline bool barrier_done(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!barrier_done(barrier, parity)) {
  }
}

// Copies `bytes` (a multiple of 16, both ends aligned to 16) by the copy engine, which completes on
// `barrier`. The lines are not kept in L2 for long: weights are read once a step.
__device__ inline void bulk_copy(void* to_shared, const void* from, uint32_t bytes, uint64_t* barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(shared_address(to_shared)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies a float without waiting for it; copies_wait() waits for all of the thread's own.
__device__ inline void copy_later(float* to_shared, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to_shared)), "l"(from)
               : "memory");
}
__device__ inline void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// The same of 16 bytes, both ends aligned; zeros where there is nothing to copy.
__device__ inline void copy_later_16(void* to_shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
// What the thread copies since the call before is a group; waits until but the last kGroups are done.
__device__ inline void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ inline void copies_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Brings the line of `p` into L2.
__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Words that multiprocessors tell each other, past the first-level cache. Relaxed: they order nothing else.
__device__ inline uint32_t load_relaxed(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// Four of them, `bytes` behind p, if `there`; else they stay as they are. (The address is made here so that
// those of many loads take no registers.)
__device__ inline void load_relaxed_if(bool there, const uint32_t* p, uint32_t bytes, uint32_t (&words)[4]) {
  asm volatile(
      "{\n .reg .pred p;\n .reg .u64 at;\n setp.ne.u32 p, %5, 0;\n cvt.u64.u32 at, %6;\n add.u64 at, at, "
      "%4;\n"
      " @p ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [at];\n}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(p), "r"(there ? 1 : 0), "r"(bytes)
      : "memory");
}
__device__ inline void store_relaxed(uint32_t* p, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
// Counts to `count`, which is 0 again.
__device__ inline void count_up_to(uint32_t* p, uint32_t count) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(p), "r"(count - 1) : "memory");
}

// `threads` threads of the block, in whole warps, wait for each other; number 0 is __syncthreads's.
__device__ inline void meet(int number, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same without waiting, by those who only tell the others that they are there.
__device__ inline void arrive(int number, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Programmatic dependent launch: what follows the wait sees all that the kernel before wrote; what may be
// started early is what comes before the wait of the kernel after.
#ifdef NIBBLE_HOPPER_OR_LATER
__device__ inline void dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else  // launch_early() starts no kernel early
__device__ inline void dependency_wait() {}
__device__ inline void dependency_launch() {}
#endif

// A whole warp group takes, or gives back, registers of the block: how many a thread has from here on.
template <int kCount>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// c += a b: m16n8k16, bf16 in, float32 sums.
__device__ inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a b: m16n8k8 of float32 numbers without their last 13 bits, float32 sums.
__device__ inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four blocks of 8 x 8 bfloat16, a pair of each for every lane, as an operand of mma_bf16 wants them. at:
// lane 8 i + r has the address of row r (16 bytes) of block i.
__device__ inline void load_matrices(const void* at, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(at))
               : "memory");
}

__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// The product by one number, the low or the high half of `b`, without a register that holds it twice.
__device__ inline uint32_t mul_bf16x2_half(uint32_t a, uint32_t b, bool high) {
  uint32_t out;
  if (high) {
    asm("{\n .reg .b16 l, h;\n .reg .b32 both;\n mov.b32 {l, h}, %2;\n mov.b32 both, {h, h};\n"
        " mul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(out)
        : "r"(a), "r"(b));
  } else {
    asm("{\n .reg .b16 l, h;\n .reg .b32 both;\n mov.b32 {l, h}, %2;\n mov.b32 both, {l, l};\n"
        " mul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(out)
        : "r"(a), "r"(b));
  }
  return out;
}

// The low, or the high, half in both halves.
__device__ inline uint32_t low_twice(uint32_t x) { return __byte_perm(x, 0, 0x1010); }
__device__ inline uint32_t high_twice(uint32_t x) { return __byte_perm(x, 0, 0x3232); }

__device__ inline uint32_t rotate_right(uint32_t x, int by) { return __funnelshift_r(x, x, by); }

}  // namespace nibble::cuda
