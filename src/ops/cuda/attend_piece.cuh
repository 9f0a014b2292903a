// A piece of attention, by a block: the scores of some heads that share keys and values, their weights, and
// the sum of values. Every sum has an order that depends on the piece alone.
#pragma once

#include "ops/cuda/common.cuh"

namespace nibble::cuda {

inline constexpr int kAttendThreads = 256, kAttendWarps = kAttendThreads / kWarp;
inline constexpr int kPiece = 256;          // indices
inline constexpr int kColumns = 4 * kWarp;  // that a warp reads at a time: lane l has 4l to 4l + 3
inline constexpr int kTogether = 4;         // indices of a warp whose loads are on their way together
inline constexpr int kIndexStep = kAttendWarps * kTogether;

// As load_four, by one load wherever these columns are there and aligned.
__device__ inline float4 load4(const float* row, int64_t c, int64_t cols) {
  if (c + 4 <= cols && is_aligned(row + c)) return *reinterpret_cast<const float4*>(row + c);
  return load_four(row, c, cols);
}

// Of a piece and head.
struct Weighed {
  float top, sum;  // the largest score; of exp(score - top)
};

// A block's shared memory.
template <int kHeads>
struct AttendShared {
  float* q;        // [kHeads, K], K rounded up to 4
  float* key;      // [K] of the row itself, where it is prepared here
  float* value;    // [value width] likewise
  float* weights;  // [kHeads, kPiece]
  float* sums;     // [kAttendWarps, kHeads, kColumns]
  static constexpr int kSmallBytes = (kHeads * 12 + 4 + 15) / 16 * 16;  // weighed, gates, is_last
  int64_t* tokens;                                                      // [kPiece]
  Weighed* weighed;                                                     // [kHeads]
  float* gates;                                                         // [kHeads]
  bool* is_last;
  int q_stride;

  __device__ AttendShared(void* base, int dim) : q_stride((dim + 3) / 4 * 4) {
    tokens = static_cast<int64_t*>(base);
    weighed = reinterpret_cast<Weighed*>(tokens + kPiece);
    gates = reinterpret_cast<float*>(weighed + kHeads);
    is_last = reinterpret_cast<bool*>(gates + kHeads);
    sums = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(weighed) + kSmallBytes);
    weights = sums + kAttendWarps * kHeads * kColumns;
    q = weights + kHeads * kPiece;
    key = q + kHeads * q_stride;
    value = key + q_stride;
  }
  static int64_t bytes(int64_t dim, int64_t width, bool prepares) {
    auto fours = [](int64_t n) { return (n + 3) / 4 * 4; };
    return kPiece * 8 + kSmallBytes +
           (kAttendWarps * kHeads * kColumns + kHeads * kPiece + (kHeads + prepares) * fours(dim) +
            prepares * fours(width)) *
               4;
  }
};

// The indices of a piece, from 0 on; shared memory has their tokens. `own` is that of the row itself, whose
// key and value are in shared memory, too, and perhaps not yet where its token says (below 0: none is).
struct PieceIndices {
  int count = 0, own = -1;
};

// What a warp takes together: in scores kTogether neighbours of every kIndexStep indices, in the sum of
// values every kAttendWarps-th index of them (`apart`); of these columns [begin, begin + kColumns).
__device__ inline void load_rows(const float* rows, int width, const int64_t* tokens, int count, int first,
                                 int apart, int begin, float4 (&to)[kTogether]) {
  const int c = begin + 4 * static_cast<int>(threadIdx.x % kWarp);
  const float* row[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; ++j) row[j] = rows + tokens[min(first + j * apart, count - 1)] * width;
  if (width % 4 == 0 && is_aligned(rows)) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      to[j] = c < width ? *reinterpret_cast<const float4*>(row[j] + c) : float4{0, 0, 0, 0};
  } else {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) to[j] = load4(row[j], c, width);
  }
}

// Four numbers of each lane summed over the warp: lanes 0, 8, 16 and 24 have the four sums.
__device__ inline float sum_four(const float (&x)[4], unsigned lane) {
  const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
  const float a = (upper ? x[2] : x[0]) + __shfl_xor_sync(kAllLanes, upper ? x[0] : x[2], 16);
  const float b = (upper ? x[3] : x[1]) + __shfl_xor_sync(kAllLanes, upper ? x[1] : x[3], 16);
  float sum = (odd ? b : a) + __shfl_xor_sync(kAllLanes, odd ? a : b, 8);
  for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

// The scores of a piece. `keys` are the first ones that this warp takes; the next are asked for before these
// are used.
template <int kHeads>
__device__ void score(const KvView& kv, float scale, const AttendShared<kHeads>& s, int heads,
                      const PieceIndices& piece, float4 (&keys)[kTogether]) {
  const auto dim = static_cast<int>(kv.head_dim);
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  for (int first = warp * kTogether; first < piece.count; first += kIndexStep) {
    float sums[kHeads][kTogether] = {};
    for (int begin = 0; begin < dim; begin += kColumns) {
      float4 now[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) now[j] = keys[j];
      if (begin + kColumns < dim) {
        load_rows(kv.keys, dim, s.tokens, piece.count, first, 1, begin + kColumns, keys);
      } else if (first + kIndexStep < piece.count) {
        load_rows(kv.keys, dim, s.tokens, piece.count, first + kIndexStep, 1, 0, keys);
      }
      const int c = begin + 4 * lane;
      if (c >= dim) continue;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j == piece.own) now[j] = *reinterpret_cast<const float4*>(s.key + c);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) break;
        const float4 q = *reinterpret_cast<const float4*>(s.q + h * s.q_stride + c);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          sums[h][j] = fmaf(q.x, now[j].x, sums[h][j]);
          sums[h][j] = fmaf(q.y, now[j].y, sums[h][j]);
          sums[h][j] = fmaf(q.z, now[j].z, sums[h][j]);
          sums[h][j] = fmaf(q.w, now[j].w, sums[h][j]);
        }
      }
    }
    const int mine = first + lane / 8;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      const float sum = sum_four(sums[h], static_cast<unsigned>(lane));
      if (lane % 8 == 0 && mine < piece.count) s.weights[h * kPiece + mine] = sum * scale;
    }
  }
}

// exp(score - the piece's largest) in place: a warp a head.
template <int kHeads>
__device__ void weigh(const AttendShared<kHeads>& s, int heads, int count) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int head = static_cast<int>(threadIdx.x / kWarp); head < heads; head += kAttendWarps) {
    float* weights = s.weights + head * kPiece;
    float top = -INFINITY, sum = 0;
    for (int i = lane; i < count; i += kWarp) top = fmaxf(top, weights[i]);
    top = warp_max(top);
    for (int i = lane; i < count; i += kWarp) {
      const float weight = expf(weights[i] - top);
      weights[i] = weight;
      sum += weight;
    }
    sum = warp_sum(sum);
    if (lane == 0) s.weighed[head] = {top, sum};
  }
}

// put(head, column, sum of weight * value) of a piece: a warp takes every kAttendWarps-th index; then the
// warps' sums in their order. `values` are the first ones that this warp takes.
template <int kHeads, class Put>
__device__ void sum_values(const KvView& kv, const AttendShared<kHeads>& s, int heads,
                           const PieceIndices& piece, int width, float4 (&values)[kTogether], Put put) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  for (int begin = 0; begin < width; begin += kColumns) {
    const int column = begin + 4 * lane;
    float4 sums[kHeads] = {};
    for (int first = warp; first < piece.count; first += kIndexStep) {
      float4 now[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) now[j] = values[j];
      if (first + kIndexStep < piece.count)
        load_rows(kv.values, width, s.tokens, piece.count, first + kIndexStep, kAttendWarps, begin, values);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int i = first + j * kAttendWarps;
        if (i >= piece.count) break;
        if (i == piece.own && column < width) now[j] = *reinterpret_cast<const float4*>(s.value + column);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float weight = h < heads ? s.weights[h * kPiece + i] : 0.0f;
          sums[h].x = fmaf(weight, now[j].x, sums[h].x);
          sums[h].y = fmaf(weight, now[j].y, sums[h].y);
          sums[h].z = fmaf(weight, now[j].z, sums[h].z);
          sums[h].w = fmaf(weight, now[j].w, sums[h].w);
        }
      }
    }
    if (begin + kColumns < width)
      load_rows(kv.values, width, s.tokens, piece.count, warp, kAttendWarps, begin + kColumns, values);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      *reinterpret_cast<float4*>(s.sums + (warp * kHeads + h) * kColumns + 4 * lane) = sums[h];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < heads * kColumns; i += kAttendThreads) {
      const int c = begin + i % kColumns;
      float total = 0;
      for (int w = 0; w < kAttendWarps; ++w) total += s.sums[w * kHeads * kColumns + i];
      if (c < width) put(i / kColumns, c, total);
    }
    __syncthreads();
  }
}

}  // namespace nibble::cuda
