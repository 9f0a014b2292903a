// Attention over pages, of all visible positions or of chosen ones.
//
// What a (row, head) looks at is cut into pieces of kPiece indices, at multiples of kPiece: an index is a
// position, or a place in the row's list of chosen positions. Each piece gives its largest score, its sum of
// exp(score - largest) and its sum of values (piece_kernel, a block a piece); pieces join in their order
// (join_kernel):
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

constexpr int kThreads = 128, kPiece = 256;
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
  Rows<float> out;
  int64_t heads = 0;
  float* pieces = nullptr;  // [T, H, most_pieces, 2 + value width]: top, sum, values
  int64_t most_pieces = 0;
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

// q . key over the warp: lane l takes columns 4l to 4l + 3, and every 128 further.
__device__ float dot(const float* s_q, const float* key, int64_t dim, unsigned lane) {
  float sum = 0;
  for (int64_t c = 4 * lane; c < dim; c += 4 * kWarp) {
    if (c + 4 <= dim && reinterpret_cast<uintptr_t>(key + c) % 16 == 0) {
      const float4 four = *reinterpret_cast<const float4*>(key + c);
      sum = fmaf(s_q[c], four.x, sum);
      sum = fmaf(s_q[c + 1], four.y, sum);
      sum = fmaf(s_q[c + 2], four.z, sum);
      sum = fmaf(s_q[c + 3], four.w, sum);
    } else {
      for (int64_t i = c; i < dim && i < c + 4; ++i) sum = fmaf(s_q[i], key[i], sum);
    }
  }
  return warp_sum(sum);
}

__global__ void __launch_bounds__(kThreads) piece_kernel(Attend p) {
  __shared__ float s_q[kMaxHeadDim], s_weights[kPiece], s_warps[kWarp];
  __shared__ int64_t s_tokens[kPiece];
  after_kernel_before();
  const int64_t t = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
  const int64_t dim = p.kv.head_dim, width = value_width(p.kv), g = h / (p.heads / p.kv.kv_heads);
  const int32_t slot = p.rows.slots_T[t];
  const int32_t* chosen = p.chosen.data + t * p.chosen.stride;
  const Range range = range_of(p, t);
  const int64_t first_piece = range.begin / kPiece;
  const unsigned thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const float* q = p.q.data + t * p.q.stride + h * dim;
  for (int64_t c = thread; c < dim; c += kThreads) s_q[c] = q[c];

  for (int64_t piece = blockIdx.y; (first_piece + piece) * kPiece < range.end; piece += gridDim.y) {
    const int64_t at = (first_piece + piece) * kPiece, from = at < range.begin ? range.begin : at;
    const auto count = static_cast<int>((at + kPiece < range.end ? at + kPiece : range.end) - from);
    __syncthreads();  // the piece before is done with s_tokens and s_weights; s_q stands
    for (int i = static_cast<int>(thread); i < count; i += kThreads)
      s_tokens[i] = token_index(p.kv, slot, p.counts != nullptr ? chosen[from + i] : from + i, g);
    __syncthreads();
    for (int i = static_cast<int>(warp); i < count; i += kThreads / kWarp) {
      const float score = dot(s_q, p.kv.keys + s_tokens[i] * dim, dim, lane) * p.scale;
      if (lane == 0) s_weights[i] = score;
    }
    __syncthreads();
    float top = -INFINITY;
    for (int i = static_cast<int>(thread); i < count; i += kThreads) top = fmaxf(top, s_weights[i]);
    top = block_max(top, s_warps);
    float sum = 0;
    for (int i = static_cast<int>(thread); i < count; i += kThreads) {
      const float weight = expf(s_weights[i] - top);
      s_weights[i] = weight;
      sum += weight;
    }
    sum = block_sum(sum, s_warps);  // and every weight stands
    float* out = p.pieces + (int64_t{blockIdx.x} * p.most_pieces + piece) * (2 + width);
    if (thread == 0) out[0] = top, out[1] = sum;
    for (int64_t c = thread; c < width; c += kThreads) {
      // Four sums, so that four loads are on their way at once.
      float parts[4] = {};
      for (int i = 0; i < count; i += 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (i + j < count)
            parts[j] = fmaf(s_weights[i + j], p.kv.values[s_tokens[i + j] * width + c], parts[j]);
        }
      }
      out[2 + c] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) join_kernel(Attend p) {
  after_kernel_before();
  const int64_t t = blockIdx.x / p.heads, h = blockIdx.x % p.heads, width = value_width(p.kv);
  const Range range = range_of(p, t);
  const int64_t count = (range.end + kPiece - 1) / kPiece - range.begin / kPiece;
  const float* pieces = p.pieces + int64_t{blockIdx.x} * p.most_pieces * (2 + width);
  for (int64_t c = threadIdx.x; c < width; c += kThreads) {
    float top = p.sinks != nullptr ? p.sinks[h] : -INFINITY;
    float sum = p.sinks != nullptr ? 1.0f : 0.0f;  // the sink itself
    float value = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float* piece = pieces + i * (2 + width);
      const float next_top = fmaxf(top, piece[0]);
      const float keep = expf(top - next_top), take = expf(piece[0] - next_top);
      sum = sum * keep + piece[1] * take;
      value = value * keep + piece[2 + c] * take;
      top = next_top;
    }
    p.out.data[t * p.out.stride + h * width + c] = value / sum;
  }
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
            int64_t scratch_rows) {
  NIBBLE_CHECK(args.kv.head_dim <= kMaxHeadDim && args.kv.value_width() <= kMaxHeadDim && scratch_rows > 0);
  Attend p{.kv = args.kv,
           .window = args.window,
           .scale = args.scale,
           .sinks = args.sinks_H,
           .heads = args.q.cols / args.kv.head_dim,
           .pieces = scratch,
           .most_pieces = most_pieces(args, selection)};
  for (int64_t first = 0; first < args.q.rows; first += scratch_rows) {
    const int64_t rows = std::min(scratch_rows, args.q.rows - first);
    p.q = args.q.slice(first, rows);
    p.out = args.out.slice(first, rows);
    p.rows = {rows, args.rows.positions_T + first, args.rows.slots_T + first};
    if (selection != nullptr) {
      p.chosen = selection->positions.slice(first, rows);
      p.counts = selection->counts + first;
    }
    const int64_t blocks = rows * p.heads;
    const int64_t at_once = std::clamp<int64_t>(ceil_div(kEnoughBlocks, blocks), 1, p.most_pieces);
    launch_early(piece_kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(at_once)), kThreads,
                 0, stream, p);
    launch_early(join_kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, p);
  }
  check_launch("attend", args.q.rows, p.heads, args.kv.head_dim);
}

}  // namespace nibble::cuda
