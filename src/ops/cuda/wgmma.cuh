// Products by a warpgroup (wgmma, sm_90a alone) and what a cluster of blocks shares, under names, as in
// primitives.cuh. A product of 64 weight rows by N rows of x and 16 columns adds what N / 8 products m16n8k16
// add, bit for bit (docs/lab/2026-11-30-products-on-the-gpu.md).
#pragma once

#include <cstdint>

#include "ops/cuda/primitives.cuh"

namespace nibble::cuda {

// An operand in shared memory, made of 8 x 16-byte blocks that lie in 128 neighbouring bytes each. along_k:
// from the first 8 columns to the next 8; along_rows: from 8 rows to the next 8. In bytes. By a whole warp,
// which has one address: the compiler sees that behind the exchange alone, and else works out every operand
// in each lane (a fifth of the instructions of a product with decoded weights).
__device__ inline uint64_t operand(const void* at, uint32_t along_k, uint32_t along_rows) {
  // Within the block: in a cluster an address has the block's rank above.
  const uint32_t low = (shared_address(at) & 0x3FFFF) >> 4 | along_k >> 4 << 16;
  return __shfl_sync(~0u, low, 0) | static_cast<uint64_t>(along_rows >> 4) << 32;
}
// The operand `bytes` further.
__device__ inline uint64_t operand_at(uint64_t operand, uint32_t bytes) {
  return (operand & ~uint64_t{0xFFFFFFFF}) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

// Before the first of some products, and whenever their registers were written by other means.
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are under way.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading or moving registers of products before the wait in front of it.
template <int kCount>
__device__ inline void wgmma_settled(float (&c)[kCount]) {
#pragma unroll
  for (float& value : c) asm volatile("" : "+f"(value)::"memory");
}

// The address of what stands at `p` here in block `rank` of the cluster.
__device__ inline uint32_t cluster_address(const void* p, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}
// Stores, and counts the bytes at `barrier`, which is in the same block as `address`.
__device__ inline void cluster_store(uint32_t address, float value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}
__device__ inline void cluster_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}
// All threads of all blocks of the cluster meet.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

// The registers of N / 2 sums, in the assembly and as its operands.
#define NIBBLE_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NIBBLE_R16 NIBBLE_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NIBBLE_R32 NIBBLE_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NIBBLE_R64                                                   \
  NIBBLE_R32                                                         \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NIBBLE_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define NIBBLE_C8(i) NIBBLE_C4(i), NIBBLE_C4(i + 4)
#define NIBBLE_C16(i) NIBBLE_C8(i), NIBBLE_C8(i + 8)
#define NIBBLE_C32(i) NIBBLE_C16(i), NIBBLE_C16(i + 16)
#define NIBBLE_C64(i) NIBBLE_C32(i), NIBBLE_C32(i + 32)
// c = a b (add: 0), or c += a b: 64 rows of a, N rows of b (c has N / 2 = kHalf values a thread), 16 columns,
// bf16 in, float32 sums. a from shared memory, or from the registers of mma_bf16's a. i0 to i5: kHalf and the
// numbers behind it, which the operands behind the sums have.
#define NIBBLE_WGMMA(N, kHalf, i0, i1, i2, i3, i4, i5)                                                    \
  __device__ inline void wgmma(float(&c)[kHalf], uint64_t a, uint64_t b, uint32_t add) {                  \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #i2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32.bf16.bf16 {" NIBBLE_R##kHalf "}, %" #i0 ", %" #i1 ", p, 1, 1, 0, 0;\n}"         \
                 : NIBBLE_C##kHalf(0)                                                                     \
                 : "l"(a), "l"(b), "r"(add));                                                             \
  }                                                                                                       \
  __device__ inline void wgmma(float(&c)[kHalf], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,      \
                               uint64_t b, uint32_t add) {                                                \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #i5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32.bf16.bf16 {" NIBBLE_R##kHalf "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4  \
                                                       ", p, 1, 1, 0;\n}"                                 \
                 : NIBBLE_C##kHalf(0)                                                                     \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));                                 \
  }
NIBBLE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
NIBBLE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
NIBBLE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
NIBBLE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
#undef NIBBLE_WGMMA
#undef NIBBLE_R8
#undef NIBBLE_R16
#undef NIBBLE_R32
#undef NIBBLE_R64
#undef NIBBLE_C4
#undef NIBBLE_C8
#undef NIBBLE_C16
#undef NIBBLE_C32
#undef NIBBLE_C64

}  // namespace nibble::cuda
