// Attention over pages, of all visible positions or of chosen ones.
//
// A block does one (row, head). What it looks at is cut into pieces of kPiece indices, at multiples of
// kPiece: an index is a position, or a place in the row's list of chosen positions. Each piece gives its
// largest score, its sum of exp(score - largest) and its sum of values; pieces join in their order:
//   top' = max(top, piece top); sum' = sum * e^(top - top') + piece sum * e^(piece top - top'); values alike.
// So the result depends on the row's own positions alone. Bytes: keys and values once a (row, head); heads
// that share them find them in L2.
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 128, kPiece = 256;

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
};

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

__global__ void __launch_bounds__(kThreads) attend_kernel(Attend p) {
  __shared__ float s_q[kMaxHeadDim], s_values[kMaxHeadDim], s_weights[kPiece], s_warps[kWarp];
  __shared__ int64_t s_tokens[kPiece];
  const int64_t t = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
  const int64_t dim = p.kv.head_dim, width = p.kv.value_dim > 0 ? p.kv.value_dim : dim;
  const int64_t g = h / (p.heads / p.kv.kv_heads);
  const int32_t slot = p.rows.slots_T[t];
  const bool chooses = p.chosen.data != nullptr;
  const int32_t* chosen = p.chosen.data + t * p.chosen.stride;
  const int64_t last = p.rows.positions_T[t], end = chooses ? p.counts[t] : last + 1;
  const int64_t begin = !chooses && p.window > 0 && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
  const unsigned thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;

  const float* q = p.q.data + t * p.q.stride + h * dim;
  for (int64_t c = thread; c < dim; c += kThreads) s_q[c] = q[c];
  for (int64_t c = thread; c < width; c += kThreads) s_values[c] = 0;
  float top = p.sinks != nullptr ? p.sinks[h] : -INFINITY;
  float sum = p.sinks != nullptr ? 1.0f : 0.0f;  // the sink itself

  for (int64_t piece = begin / kPiece * kPiece; piece < end; piece += kPiece) {
    const int64_t from = piece < begin ? begin : piece;
    const auto count = static_cast<int>((piece + kPiece < end ? piece + kPiece : end) - from);
    __syncthreads();  // the piece before is done with s_tokens and s_weights; s_q stands
    for (int i = static_cast<int>(thread); i < count; i += kThreads)
      s_tokens[i] = token_index(p.kv, slot, chooses ? chosen[from + i] : from + i, g);
    __syncthreads();
    for (int i = static_cast<int>(warp); i < count; i += kThreads / kWarp) {
      const float score = dot(s_q, p.kv.keys + s_tokens[i] * dim, dim, lane) * p.scale;
      if (lane == 0) s_weights[i] = score;
    }
    __syncthreads();
    float piece_top = -INFINITY;
    for (int i = static_cast<int>(thread); i < count; i += kThreads)
      piece_top = fmaxf(piece_top, s_weights[i]);
    piece_top = block_max(piece_top, s_warps);
    float piece_sum = 0;
    for (int i = static_cast<int>(thread); i < count; i += kThreads) {
      const float weight = expf(s_weights[i] - piece_top);
      s_weights[i] = weight;
      piece_sum += weight;
    }
    piece_sum = block_sum(piece_sum, s_warps);  // and every weight stands

    const float next_top = fmaxf(top, piece_top);
    const float keep = expf(top - next_top), take = expf(piece_top - next_top);
    sum = sum * keep + piece_sum * take;
    top = next_top;
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
      s_values[c] = s_values[c] * keep + ((parts[0] + parts[1]) + (parts[2] + parts[3])) * take;
    }
  }
  float* out = p.out.data + t * p.out.stride + h * width;
  for (int64_t c = thread; c < width; c += kThreads) out[c] = s_values[c] / sum;  // its own columns
}

}  // namespace

void attend(cudaStream_t stream, const AttendArgs& args, const Selection* selection) {
  if (args.q.rows == 0) return;
  NIBBLE_CHECK(args.kv.head_dim <= kMaxHeadDim && args.kv.value_width() <= kMaxHeadDim);
  Attend p{.q = args.q,
           .kv = args.kv,
           .rows = args.rows,
           .chosen = {},
           .window = args.window,
           .scale = args.scale,
           .sinks = args.sinks_H,
           .out = args.out,
           .heads = args.q.cols / args.kv.head_dim};
  if (selection != nullptr) {
    p.chosen = selection->positions;
    p.counts = selection->counts;
  }
  attend_kernel<<<static_cast<unsigned>(args.q.rows * p.heads), kThreads, 0, stream>>>(p);
  check_launch("attend", args.q.rows, p.heads, args.kv.head_dim);
}

}  // namespace nibble::cuda
