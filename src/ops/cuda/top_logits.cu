// The largest logits of rows, so that the others need not leave the device: parts of a row first, then the
// largest of those, until one part holds them all.
//
// A logit and its id make a key; keys differ, and the larger one comes first. Within a part, each thread has
// some keys, and the kTopLogits-th largest of the threads' best is a bound that as many keys reach; few
// others do, and each of those counts who comes before it.
#include "base/numbers.h"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256, kEach = 16, kPart = kThreads * kEach;
constexpr int kTop = static_cast<int>(kTopLogits);
static_assert(kPart > kTop);  // so that the next level has less

// 0 is the key of nothing.
__device__ uint64_t key_of(float logit, uint32_t id) {
  uint32_t order = ~0u;
  if (!isnan(logit)) {
    const uint32_t bits = logit == 0.0f ? 0u : __float_as_uint(logit);
    order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  }
  return uint64_t{order} << 32 | ~id;
}
__device__ TokenLogit of_key(uint64_t key) {
  const auto order = static_cast<uint32_t>(key >> 32);
  const float logit = __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
  return {logit, static_cast<int32_t>(~static_cast<uint32_t>(key))};
}

// By a block: take(rank, key) of the kTop largest of key(0) to key(count - 1); of fewer, if there are.
template <class Key, class Take>
__device__ void top_of(int count, Key key, Take take) {
  __shared__ uint64_t s_best[kThreads], s_candidates[kTop * kEach], s_bound;
  __shared__ int s_found;
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t mine[kEach], best = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * kThreads + thread;
    mine[i] = at < count ? key(at) : 0;
    best = max(best, mine[i]);
  }
  s_best[thread] = best;
  if (thread == 0) s_found = 0, s_bound = 0;
  __syncthreads();
  int larger = 0;
#pragma unroll 8
  for (int other = 0; other < kThreads; ++other) larger += s_best[other] > best ? 1 : 0;
  if (larger == kTop - 1 && best != 0) s_bound = best;
  __syncthreads();
  const uint64_t bound = s_bound;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    // No more than kTop threads have such keys.
    if (mine[i] != 0 && mine[i] >= bound) s_candidates[atomicAdd(&s_found, 1)] = mine[i];
  }
  __syncthreads();
  for (int c = thread; c < s_found; c += kThreads) {
    int rank = 0;
    for (int other = 0; other < s_found; ++other) rank += s_candidates[other] > s_candidates[c] ? 1 : 0;
    if (rank < kTop) take(rank, s_candidates[c]);
  }
  for (int rank = s_found + thread; rank < kTop; rank += kThreads) take(rank, 0);
}

// The keys that a level leaves of `count`.
__host__ __device__ int64_t keys_after(int64_t count) { return (count + kPart - 1) / kPart * kTop; }

// Block (row, part).
__global__ void __launch_bounds__(kThreads) first_parts(Rows<const float> logits, uint64_t* to) {
  after_kernel_before();
  const int64_t row = blockIdx.x, begin = int64_t{blockIdx.y} * kPart;
  const float* from = logits.data + row * logits.stride + begin;
  to += row * keys_after(logits.cols) + int64_t{blockIdx.y} * kTop;
  top_of(
      static_cast<int>(min(logits.cols - begin, int64_t{kPart})),
      [&](int i) { return key_of(from[i], static_cast<uint32_t>(begin + i)); },
      [&](int rank, uint64_t key) { to[rank] = key; });
}
__global__ void __launch_bounds__(kThreads) next_parts(const uint64_t* from, int64_t count, uint64_t* to) {
  after_kernel_before();
  const int64_t row = blockIdx.x, begin = int64_t{blockIdx.y} * kPart;
  from += row * count + begin;
  to += row * keys_after(count) + int64_t{blockIdx.y} * kTop;
  top_of(
      static_cast<int>(min(count - begin, int64_t{kPart})), [&](int i) { return from[i]; },
      [&](int rank, uint64_t key) { to[rank] = key; });
}
__global__ void __launch_bounds__(kThreads) last_part(const uint64_t* from, int count, Rows<TokenLogit> out) {
  after_kernel_before();
  const int64_t row = blockIdx.x;
  from += row * count;
  top_of(
      count, [&](int i) { return from[i]; },
      [&](int rank, uint64_t key) {
        if (rank < out.cols) out.data[row * out.stride + rank] = of_key(key);
      });
}

}  // namespace

int64_t top_logits_scratch(int64_t rows, int64_t vocab) {
  int64_t count = keys_after(vocab), all = count;
  for (; count > kPart; all += count) count = keys_after(count);
  return rows * all;
}

void top_logits(cudaStream_t stream, Rows<const float> logits, Rows<TokenLogit> out, uint64_t* keys) {
  const auto rows = static_cast<unsigned>(logits.rows);
  if (rows == 0) return;
  auto grid = [&](int64_t count) { return dim3(rows, static_cast<unsigned>(ceil_div(count, kPart))); };
  launch_early(first_parts, grid(logits.cols), kThreads, 0, stream, logits, keys);
  int64_t count = keys_after(logits.cols);
  while (count > kPart) {
    uint64_t* next = keys + rows * count;
    launch_early(next_parts, grid(count), kThreads, 0, stream, keys, count, next);
    keys = next;
    count = keys_after(count);
  }
  launch_early(last_part, rows, kThreads, 0, stream, keys, static_cast<int>(count), out);
  check_launch("top_logits", logits.rows, logits.cols);
}

}  // namespace nibble::cuda
