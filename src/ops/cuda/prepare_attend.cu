#include "base/numbers.h"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/prepare_attend.cuh"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

constexpr int kHeads = 4;  // of a block, a warp each

// Heads of a row: H of q, then G of k, then G of v.
__global__ void __launch_bounds__(kHeads* kWarp) prepare_attend_kernel(PrepareAttendArgs p, int query_heads) {
  extern __shared__ float s_heads[];  // [kHeads, K]
  after_kernel_before();
  const auto dim = static_cast<int>(p.kv.head_dim), kv_heads = static_cast<int>(p.kv.kv_heads);
  const int64_t t = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y * kHeads + threadIdx.x / kWarp);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if (head >= query_heads + 2 * kv_heads) return;
  const bool is_query = head < query_heads;
  const int g = is_query ? 0 : (head - query_heads) % kv_heads;
  int64_t token = 0;
  if (!is_query) token = token_index(p.kv, p.rows.slots_T[t], p.rows.positions_T[t], g);
  if (head >= query_heads + kv_heads) {
    const int width = p.kv.value_dim > 0 ? static_cast<int>(p.kv.value_dim) : dim;
    const float* value = p.v.data + t * p.v.stride + g * width;
#pragma unroll 4
    for (int c = lane; c < width; c += kWarp) p.kv.values[token * width + c] = value[c];
    return;
  }
  float* x = is_query ? p.q.data + t * p.q.stride + head * dim : p.k.data + t * p.k.stride + g * dim;
  float* s_x = s_heads + threadIdx.x / kWarp * dim;
  const float* norm = is_query ? p.q_norm : p.k_norm;
  prepare_head(p, t, x, norm, HeadAhead(p, t, x, norm), s_x);
  float* out = is_query ? x : p.kv.keys + token * dim;
  for (int c = lane; c < dim; c += kWarp) out[c] = s_x[c];
}

}  // namespace

void prepare_attend(cudaStream_t stream, const PrepareAttendArgs& args) {
  if (args.rows.count == 0) return;
  NIBBLE_CHECK(args.kv.head_dim <= kMaxHeadDim);
  const int64_t query_heads = args.q.cols / args.kv.head_dim, heads = query_heads + 2 * args.kv.kv_heads;
  const size_t shared = static_cast<size_t>(kHeads * args.kv.head_dim) * sizeof(float);
  launch_early(prepare_attend_kernel,
               dim3(static_cast<unsigned>(args.rows.count), static_cast<unsigned>(ceil_div(heads, kHeads))),
               kHeads * kWarp, shared, stream, args, static_cast<int>(query_heads));
  check_launch("prepare_attend", args.rows.count, heads, args.kv.head_dim);
}

}  // namespace nibble::cuda
