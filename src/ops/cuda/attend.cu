// Attention over pages, of all visible positions or of chosen ones.
//
// What a (row, head) looks at is cut into pieces of kPiece indices, at multiples of kPiece: an index is a
// position, or a place in the row's list of chosen positions. Each piece gives its largest score, its sum of
// exp(score - largest) and its sum of values; the block that ends last joins the pieces in their order:
//   top' = max(top, piece top); sum' = sum * e^(top - top') + piece sum * e^(piece top - top'); values alike.
// So the result depends on the row's own positions alone. Bytes: keys and values once a (row, head); heads
// that share them find them in L2.
#include <algorithm>

#include "base/numbers.h"
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kPiece = 256;
constexpr int kColumns = 4 * kWarp;      // that a warp reads at a time
constexpr int64_t kEnoughBlocks = 4096;  // for any GPU; with more rows, a block takes several pieces

struct Attend {
  Rows<const float> q;
  KvView kv;
  RowsOfStep rows;
  Rows<const int32_t> chosen;       // [T, at least counts]; null data: all visible positions
  const int32_t* counts = nullptr;  // [T]
  int64_t window = 0;
  float scale = 1;
  const float* sinks = nullptr;
  OutputGate gate_kind = OutputGate::kNone;
  Rows<const float> gate;
  Rows<float> out;
  int64_t heads = 0;
  float* pieces = nullptr;  // [T, H, most_pieces, 2 + value width]: top, sum, values
  int64_t most_pieces = 0;
  uint32_t* arrived = nullptr;  // [T, H] blocks that are done; zero between launches
};

// The indices [begin, end) that row t looks at.
struct Range {
  int64_t begin = 0, end = 0;
};
__device__ Range range_of(const Attend& p, int64_t t) {
  if (p.counts != nullptr) return {0, p.counts[t]};
  const int64_t end = p.rows.positions_T[t] + int64_t{1};
  return {p.window > 0 && end > p.window ? end - p.window : 0, end};
}
__device__ int64_t value_width(const KvView& kv) { return kv.value_dim > 0 ? kv.value_dim : kv.head_dim; }

__device__ float4 load4(const float* row, int64_t c, int64_t cols) {
  if (c + 4 <= cols && reinterpret_cast<uintptr_t>(row + c) % 16 == 0)
    return *reinterpret_cast<const float4*>(row + c);
  float4 four = {0, 0, 0, 0};
  if (c < cols) four.x = row[c];
  if (c + 1 < cols) four.y = row[c + 1];
  if (c + 2 < cols) four.z = row[c + 2];
  if (c + 3 < cols) four.w = row[c + 3];
  return four;
}

// The scores of `count` positions, four at a time of a warp so that their loads are on their way together:
// lane l takes columns 4l to 4l + 3, and every kColumns further.
__device__ void score(const Attend& p, const float* s_q, const int64_t* s_tokens, int count,
                      float* s_scores) {
  const int64_t dim = p.kv.head_dim;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int first = static_cast<int>(warp) * 4; first < count; first += kWarps * 4) {
    float sums[4] = {};
    for (int64_t c = 4 * lane; c < dim; c += kColumns) {
      float4 keys[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        keys[j] = load4(p.kv.keys + s_tokens[min(first + j, count - 1)] * dim, c, dim);
      const float4 q = *reinterpret_cast<const float4*>(s_q + c);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[j] = fmaf(q.x, keys[j].x, sums[j]);
        sums[j] = fmaf(q.y, keys[j].y, sums[j]);
        sums[j] = fmaf(q.z, keys[j].z, sums[j]);
        sums[j] = fmaf(q.w, keys[j].w, sums[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float sum = warp_sum(sums[j]);
      if (lane == 0 && first + j < count) s_scores[first + j] = sum * p.scale;
    }
  }
}

// out[c] = sum over the positions of weight * value: a warp takes every kWarps-th position; then the warps'
// sums in their order.
__device__ void sum_values(const Attend& p, const float* s_weights, const int64_t* s_tokens, int count,
                           int64_t width, float (*s_sums)[kColumns], float* out) {
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t begin = 0; begin < width; begin += kColumns) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll 4
    for (int i = static_cast<int>(warp); i < count; i += kWarps) {
      const float4 value = load4(p.kv.values + s_tokens[i] * width, begin + 4 * lane, width);
      const float weight = s_weights[i];
      sum.x = fmaf(weight, value.x, sum.x);
      sum.y = fmaf(weight, value.y, sum.y);
      sum.z = fmaf(weight, value.z, sum.z);
      sum.w = fmaf(weight, value.w, sum.w);
    }
    *reinterpret_cast<float4*>(&s_sums[warp][4 * lane]) = sum;
    __syncthreads();
    const int64_t c = begin + threadIdx.x;
    if (threadIdx.x < kColumns && c < width) {
      float total = 0;
      for (int w = 0; w < kWarps; ++w) total += s_sums[w][threadIdx.x];
      out[c] = total;
    }
    __syncthreads();
  }
}

// The pieces of (t, h) in their order, the sink and the gate.
__device__ void join(const Attend& p, int64_t t, int64_t h, int64_t count, int64_t width) {
  const float* pieces = p.pieces + (t * p.heads + h) * p.most_pieces * (2 + width);
  const float* gate = p.gate.data + t * p.gate.stride;
  for (int64_t c = threadIdx.x; c < width; c += kThreads) {
    float top = p.sinks != nullptr ? p.sinks[h] : -INFINITY;
    float sum = p.sinks != nullptr ? 1.0f : 0.0f;  // the sink itself
    float value = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float* piece = pieces + i * (2 + width);
      const float piece_top = __ldcg(piece), piece_sum = __ldcg(piece + 1);
      const float next_top = fmaxf(top, piece_top);
      const float keep = expf(top - next_top), take = expf(piece_top - next_top);
      sum = sum * keep + piece_sum * take;
      value = value * keep + __ldcg(piece + 2 + c) * take;
      top = next_top;
    }
    value /= sum;
    if (p.gate_kind == OutputGate::kSigmoidElement) {
      value *= sigmoid(gate[h * width + c]);
    } else if (p.gate_kind != OutputGate::kNone) {
      value *= softplus(gate[p.gate_kind == OutputGate::kSoftplusHead ? h : h * width + c]);
    }
    p.out.data[t * p.out.stride + h * width + c] = value;
  }
}

__global__ void __launch_bounds__(kThreads) attend_kernel(Attend p) {
  __shared__ __align__(16) float s_q[kMaxHeadDim], s_sums[kWarps][kColumns];
  __shared__ float s_weights[kPiece], s_warps[kWarps];
  __shared__ int64_t s_tokens[kPiece];
  __shared__ bool s_is_last;
  after_kernel_before();
  const int64_t t = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
  const int64_t dim = p.kv.head_dim, width = value_width(p.kv), g = h / (p.heads / p.kv.kv_heads);
  const int32_t slot = p.rows.slots_T[t];
  const int32_t* chosen = p.chosen.data + t * p.chosen.stride;
  const Range range = range_of(p, t);
  const int64_t first_piece = range.begin / kPiece, pieces = (range.end + kPiece - 1) / kPiece - first_piece;
  const unsigned thread = threadIdx.x;
  if (blockIdx.y > 0 && blockIdx.y >= pieces) return;
  const float* q = p.q.data + t * p.q.stride + h * dim;
  for (int64_t c = thread; c < (dim + 3) / 4 * 4; c += kThreads) s_q[c] = c < dim ? q[c] : 0.0f;

  for (int64_t piece = blockIdx.y; piece < pieces; piece += gridDim.y) {
    const int64_t at = (first_piece + piece) * kPiece, from = at < range.begin ? range.begin : at;
    const auto count = static_cast<int>((at + kPiece < range.end ? at + kPiece : range.end) - from);
    for (int i = static_cast<int>(thread); i < count; i += kThreads)
      s_tokens[i] = token_index(p.kv, slot, p.counts != nullptr ? chosen[from + i] : from + i, g);
    __syncthreads();
    score(p, s_q, s_tokens, count, s_weights);
    __syncthreads();
    static_assert(kThreads == kPiece);
    const bool is_position = static_cast<int>(thread) < count;
    const float top = block_max(is_position ? s_weights[thread] : -INFINITY, s_warps);
    const float weight = is_position ? expf(s_weights[thread] - top) : 0.0f;
    s_weights[thread] = weight;
    const float sum = block_sum(weight, s_warps);  // and every weight stands
    float* out = p.pieces + (int64_t{blockIdx.x} * p.most_pieces + piece) * (2 + width);
    if (thread == 0) out[0] = top, out[1] = sum;
    sum_values(p, s_weights, s_tokens, count, width, s_sums, out + 2);
  }
  // sum_values ends with a barrier: what the block wrote is ordered before the fence of its first thread.
  const auto blocks = static_cast<uint32_t>(pieces < gridDim.y ? pieces : gridDim.y);
  if (blocks > 1) {
    if (thread == 0) {
      __threadfence();
      s_is_last = atomicAdd(p.arrived + blockIdx.x, 1) == blocks - 1;
      if (s_is_last) p.arrived[blockIdx.x] = 0;
      __threadfence();
    }
    __syncthreads();
    if (!s_is_last) return;
  }
  join(p, t, h, pieces, width);
}

// How many pieces a row can have: its visible or chosen indices may begin in the middle of one.
int64_t most_pieces(const AttendArgs& args, const Selection* selection) {
  if (selection != nullptr) return ceil_div(selection->positions.cols, kPiece);
  const int64_t known = args.kv.table_pages * args.kv.page_tokens;
  return ceil_div(args.window > 0 ? std::min(args.window, known) : known, kPiece) + 1;
}

}  // namespace

int64_t attend_row_scratch(const AttendArgs& args, const Selection* selection) {
  return args.q.cols / args.kv.head_dim * most_pieces(args, selection) * (2 + args.kv.value_width());
}

void attend(cudaStream_t stream, const AttendArgs& args, const Selection* selection, float* scratch,
            int64_t scratch_rows, uint32_t* arrived) {
  NIBBLE_CHECK(args.kv.head_dim <= kMaxHeadDim && args.kv.value_width() <= kMaxHeadDim && scratch_rows > 0);
  Attend p{.kv = args.kv,
           .window = args.window,
           .scale = args.scale,
           .sinks = args.sinks_H,
           .gate_kind = args.gate_kind,
           .heads = args.q.cols / args.kv.head_dim,
           .pieces = scratch,
           .most_pieces = most_pieces(args, selection),
           .arrived = arrived};
  for (int64_t first = 0; first < args.q.rows; first += scratch_rows) {
    const int64_t rows = std::min(scratch_rows, args.q.rows - first);
    p.q = args.q.slice(first, rows);
    p.out = args.out.slice(first, rows);
    if (args.gate_kind != OutputGate::kNone) p.gate = args.gate.slice(first, rows);
    p.rows = {rows, args.rows.positions_T + first, args.rows.slots_T + first};
    if (selection != nullptr) {
      p.chosen = selection->positions.slice(first, rows);
      p.counts = selection->counts + first;
    }
    const int64_t blocks = rows * p.heads;
    const int64_t at_once = std::clamp<int64_t>(ceil_div(kEnoughBlocks, blocks), 1, p.most_pieces);
    launch_early(attend_kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(at_once)), kThreads,
                 0, stream, p);
  }
  check_launch("attend", args.q.rows, p.heads, args.kv.head_dim);
}

}  // namespace nibble::cuda
