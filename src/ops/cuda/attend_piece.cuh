// A piece of attention, by a block: the scores of some heads that share keys and values, their weights, and
// the sum of values. Every sum has an order that depends on the piece alone (attend.cuh).
#pragma once

#include "ops/cuda/attend.cuh"

namespace nibble::cuda {

inline constexpr int kColumns = 16 * kAttendWarps;  // of values that the block takes at a time, a warp 16
inline constexpr int kKeyTiles = 2;                 // of eight keys, of a warp: number warp and warp + 8
inline constexpr int kKeysAhead = 4;                // steps of columns under way
inline constexpr int kValuesAhead = 4;              // steps of indices under way
inline constexpr int kWeightStride = kPiece + 8;    // lanes read from all banks

// Of a row; vectors: all rows are aligned, and their ends. Others take a function of its own, since code that
// nobody runs makes room for none that is run.
static __noinline__ __device__ float4 load_any_four(const float* row, int c, int cols) {
  return load_four(row, c, cols);
}
__device__ inline float4 load4(const float* row, int c, int cols, bool vectors) {
  if (!vectors) return load_any_four(row, c, cols);
  return c < cols ? *reinterpret_cast<const float4*>(row + c) : float4{};
}
__device__ inline float2 load2(const float* row, int c, int cols, bool vectors) {
  if (vectors) return c < cols ? *reinterpret_cast<const float2*>(row + c) : float2{};
  const float4 x = load_any_four(row, c, min(cols, c + 2));
  return {x.x, x.y};
}

// A block's shared memory.
template <int kHeads>
struct AttendShared {
  float* q;        // [kHeads, K], K rounded up: zero beyond it
  float* key;      // [K] of the row itself, where it is prepared here
  float* value;    // [value width] likewise
  float* weights;  // [kHeads, kWeightStride]
  float* sums;     // [kHeads, kColumns]
  static constexpr int kSmallBytes = (kHeads * 12 + 4 + 15) / 16 * 16;  // weighed, gates, is_last
  int64_t* tokens;                                                      // [kPiece]
  Weighed* weighed;                                                     // [kHeads]
  float* gates;                                                         // [kHeads]
  bool* is_last;
  int q_stride;

  // Whole steps, and rows beside each other in other banks.
  static __host__ __device__ int stride_of(int64_t dim) {
    return static_cast<int>((dim + 31) / 32 * 32 + 16);
  }

  __device__ AttendShared(void* base, int dim) : q_stride(stride_of(dim)) {
    tokens = static_cast<int64_t*>(base);
    weighed = reinterpret_cast<Weighed*>(tokens + kPiece);
    gates = reinterpret_cast<float*>(weighed + kHeads);
    is_last = reinterpret_cast<bool*>(gates + kHeads);
    weights = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(weighed) + kSmallBytes);
    sums = weights + kHeads * kWeightStride;
    q = sums + kHeads * kColumns;
    key = q + kHeads * q_stride;
    value = key + q_stride;
  }
  static int64_t bytes(int64_t dim, int64_t width, bool prepares) {
    return kPiece * 8 + kSmallBytes +
           (kHeads * (kWeightStride + kColumns) + (kHeads + prepares) * stride_of(dim) +
            prepares * (width + 3) / 4 * 4) *
               4;
  }
};

// The indices [first, last) of a piece that the row looks at; shared memory has their tokens. `own` is that
// of the row itself, whose key and value are in shared memory, too, and perhaps not yet where its token says
// (below 0: none is).
struct PieceIndices {
  int first = 0, last = 0, own = -1;
  bool vectors = false;  // see load4
  __device__ int within(int i) const { return min(max(i, first), last - 1); }
};

// Where a tile of this warp's begins.
__device__ inline int key_tile(int tile) {
  return (static_cast<int>(threadIdx.x / kWarp) + tile * kAttendWarps) * kIndexStep;
}
// What this lane takes of the piece's keys in a step of columns.
template <int kHeads>
__device__ inline float4 load_key(const KvView& kv, const AttendShared<kHeads>& s, const PieceIndices& piece,
                                  int tile, int step) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const auto dim = static_cast<int>(kv.head_dim);
  const int i = key_tile(tile) + lane / 4, c = step * kDimStep + lane % 4 * 4;
  const float* key = kv.keys + s.tokens[piece.within(i)] * dim;
  return load4(key, c, dim, piece.vectors);
}
template <int kHeads>
__device__ inline void load_keys(const KvView& kv, const AttendShared<kHeads>& s, const PieceIndices& piece,
                                 float4 (&keys)[kKeysAhead][kKeyTiles]) {
  const int steps = (static_cast<int>(kv.head_dim) + kDimStep - 1) / kDimStep;
#pragma unroll
  for (int u = 0; u < kKeysAhead; ++u) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      if (u < steps && key_tile(tile) < piece.last) keys[u][tile] = load_key(kv, s, piece, tile, u);
    }
  }
}

// The scores of a piece. `keys` are the first ones that this lane takes.
template <int kHeads>
__device__ void score(const KvView& kv, float scale, const AttendShared<kHeads>& s, int heads,
                      const PieceIndices& piece, float4 (&keys)[kKeysAhead][kKeyTiles]) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), g = lane / 4, q = lane % 4;
  const int steps = (static_cast<int>(kv.head_dim) + kDimStep - 1) / kDimStep;
  if (key_tile(0) >= piece.last) return;
  Sums<kKeyTiles> sums;
  // Not unrolled: at one row most of the time is for instructions that run for the first time.
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int c = step * kDimStep + 4 * q;
    float4 now[kKeyTiles];
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      now[tile] = keys[0][tile];
#pragma unroll
      for (int u = 1; u < kKeysAhead; ++u) keys[u - 1][tile] = keys[u][tile];
      if (step + kKeysAhead < steps && key_tile(tile) < piece.last)
        keys[kKeysAhead - 1][tile] = load_key(kv, s, piece, tile, step + kKeysAhead);
      if (key_tile(tile) + g == piece.own) now[tile] = *reinterpret_cast<const float4*>(s.key + c);
    }
    const float4 a = *reinterpret_cast<const float4*>(s.q + g * s.q_stride + c);
    float4 b = {};
    if constexpr (kHeads > 8) b = *reinterpret_cast<const float4*>(s.q + (g + 8) * s.q_stride + c);
    multiply_keys(sums, 0, a, b, now);
  }
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int h = g + v / 2 * 8, i = key_tile(tile) + 2 * q + v % 2;
      if (h < heads) s.weights[h * kWeightStride + i] = sums.of(tile, v) * scale;
    }
  }
}

// exp(score - the piece's largest) in place: a warp a head.
template <int kHeads>
__device__ void weigh(const AttendShared<kHeads>& s, int heads, const PieceIndices& piece) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int head = static_cast<int>(threadIdx.x / kWarp); head < heads; head += kAttendWarps) {
    float x[4], top = -INFINITY;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int i = 2 * lane + v / 2 * (kPiece / 2) + v % 2;
      x[v] = i >= piece.first && i < piece.last ? s.weights[head * kWeightStride + i] : -INFINITY;
      top = fmaxf(top, x[v]);
    }
    top = warp_max(top);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      x[v] = expf(x[v] - top);
      s.weights[head * kWeightStride + 2 * lane + v / 2 * (kPiece / 2) + v % 2] = x[v];
    }
    // attend_many has the four of each lane q, of eight of its steps at a time, in registers.
    float sum = ((x[0] + x[1]) + x[2]) + x[3];
    for (int distance : {4, 8, 16, 1, 2}) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (lane == 0) s.weighed[head] = {top, sum};
  }
}

// What this lane takes of the piece's values in a step of indices, columns begin and begin + 1.
template <int kHeads>
__device__ inline void load_value(const KvView& kv, const AttendShared<kHeads>& s, const PieceIndices& piece,
                                  int step, int begin, float2 (&values)[2]) {
  const auto width = static_cast<int>(value_width(kv));
  const int i = step * kIndexStep + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2; ++j)
    values[j] = load2(kv.values + s.tokens[piece.within(i + j)] * width, begin, width, piece.vectors);
}
__device__ inline int value_column() {
  return static_cast<int>(threadIdx.x / kWarp) * 16 + static_cast<int>(threadIdx.x) % kWarp / 4 * 2;
}
template <int kHeads>
__device__ inline void load_values(const KvView& kv, const AttendShared<kHeads>& s, const PieceIndices& piece,
                                   int begin, float2 (&values)[kValuesAhead][2]) {
  const int first = piece.first / kIndexStep;
#pragma unroll
  for (int u = 0; u < kValuesAhead; ++u) {
    if ((first + u) * kIndexStep < piece.last)
      load_value(kv, s, piece, first + u, begin + value_column(), values[u]);
  }
}

// put(head, column, sum of weight * value) of a piece. `values` are the first ones that this
// lane takes.
template <int kHeads, class Put>
__device__ void sum_values(const KvView& kv, const AttendShared<kHeads>& s, int heads,
                           const PieceIndices& piece, int width, float2 (&values)[kValuesAhead][2], Put put) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const int g = lane / 4, q = lane % 4;
  const int first = piece.first / kIndexStep, last = (piece.last + kIndexStep - 1) / kIndexStep;
  for (int begin = 0; begin < width; begin += kColumns) {
    if (begin > 0) load_values(kv, s, piece, begin, values);
    const int column = begin + value_column();
    Sums<2> sums;
#pragma unroll 1
    for (int step = first; step < last; ++step) {
      const int i = step * kIndexStep + 2 * q;
      float2 now[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        now[j] = values[0][j];
#pragma unroll
        for (int u = 1; u < kValuesAhead; ++u) values[u - 1][j] = values[u][j];
        if (i + j == piece.own) now[j] = load2(s.value, column, width, piece.vectors);
        if (i + j < piece.first || i + j >= piece.last) now[j] = {};  // of weight 0, and perhaps not a number
      }
      if (step + kValuesAhead < last)
        load_value(kv, s, piece, step + kValuesAhead, column, values[kValuesAhead - 1]);
      const float2 a = *reinterpret_cast<const float2*>(s.weights + g * kWeightStride + i);
      float2 b = {};
      if constexpr (kHeads > 8) b = *reinterpret_cast<const float2*>(s.weights + (g + 8) * kWeightStride + i);
      const ColumnOperand columns[2] = {{now[0].x, now[1].x}, {now[0].y, now[1].y}};
      multiply(sums, 0, RowOperand(a.x, a.y, b.x, b.y), columns);
    }
    float* const to = s.sums + g * kColumns + warp * 16 + 4 * q;
#pragma unroll
    for (int half = 0; half < kHeads / 8; ++half)
      *reinterpret_cast<float4*>(to + half * 8 * kColumns) = {
          sums.of(0, 2 * half), sums.of(1, 2 * half), sums.of(0, 2 * half + 1), sums.of(1, 2 * half + 1)};
    __syncthreads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < heads * kColumns; i += kAttendThreads) {
      const int c = begin + i % kColumns;
      if (c < width) put(i / kColumns, c, s.sums[i]);
    }
    __syncthreads();
  }
}

}  // namespace nibble::cuda
