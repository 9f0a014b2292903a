// What the kernels of attention share: the cut into pieces, the order of every sum, and how pieces join.
//
// What a (row, head) looks at is cut into pieces of kPiece indices, at multiples of kPiece: an index is a
// position, or a place in the row's list of chosen positions. Each piece gives its largest score, its sum of
// exp(score - largest) and its sum of values; pieces join in their order:
//   top' = max(top, piece top); sum' = sum * e^(top - top') + piece sum * e^(piece top - top'); values alike.
// So the result depends on the row's own positions alone.
//
// Products run on the tensor cores: a float32 number goes in as the sum of two with 11 bits of mantissa, and
// of the four products of two such the smallest is left out (below 2^-20 of the whole). m16n8k8 has 16 rows
// (heads, or heads of several rows) as its M; a score adds the columns of K in steps of 16, of which lane q
// (0..3) has four beside each other, in two products of two each; a value adds the indices in steps of eight,
// of which lane q has two. An index that the row does not look at has weight 0, which changes no sum (of
// finite values).
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/cuda/kernels.h"
#include "ops/cuda/primitives.cuh"

namespace nibble::cuda {

inline constexpr int kAttendThreads = 256, kAttendWarps = kAttendThreads / kWarp;
inline constexpr int kPiece = 128;       // indices
inline constexpr int kDimStep = 16;      // columns of a key
inline constexpr int kIndexStep = 8;     // indices
inline constexpr int kOperandRows = 16;  // of M
inline constexpr int kPieceSteps = kPiece / kIndexStep;

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
  int heads = 0;
  int chunks = 0;           // of the heads that share keys and values: blocks
  int chunk_heads = 0;      // heads of a chunk but for the last
  float* pieces = nullptr;  // [T, H, most_pieces, 2 + value width]: top, sum, values
  int64_t most_pieces = 0;
  uint32_t* arrived = nullptr;  // [T, G, chunks] blocks that are done; zero between launches
  // Rows first, first + 1, ... of so many of the step. Tiles of tile_rows of these that are of one sequence
  // are attend_many's (0: none is).
  int first = 0, all_rows = 0, tile_rows = 0;
  const int32_t* all_slots = nullptr;
  bool vectors = false;  // queries, keys and values are aligned to 16 bytes, and so are their rows
};

// Of a piece and head.
struct Weighed {
  float top, sum;  // the largest score; of exp(score - top)
};

// The indices [begin, end) that row t looks at.
struct IndexRange {
  int begin = 0, end = 0;
};
__device__ inline IndexRange range_of(const Attend& p, int64_t t) {
  if (p.counts != nullptr) return {0, p.counts[t]};
  const int end = p.rows.positions_T[t] + 1;
  return {p.window > 0 && end > p.window ? end - static_cast<int>(p.window) : 0, end};
}
__device__ inline int64_t value_width(const KvView& kv) {
  return kv.value_dim > 0 ? kv.value_dim : kv.head_dim;
}

// By the whole block: whether a tile of the step's rows is of one sequence.
__device__ inline bool is_of_one_sequence(const Attend& p, int tile) {
  const int first = tile * p.tile_rows, count = min(p.tile_rows, p.all_rows - first);
  const int i = static_cast<int>(threadIdx.x);
  return __syncthreads_and(i >= count || p.all_slots[first + i] == p.all_slots[first]) != 0;
}

// The pieces of a head so far.
struct Joined {
  float top, sum;
  __device__ explicit Joined(const Attend& p, int h)
      : top(p.sinks != nullptr ? p.sinks[h] : -INFINITY),
        sum(p.sinks != nullptr ? 1.0f : 0.0f) {}  // the sink itself
  // The next piece: what the values so far, and its own, are multiplied with.
  __device__ void add(const Weighed& piece, float& keep, float& take) {
    const float next_top = fmaxf(top, piece.top);
    keep = expf(top - next_top), take = expf(piece.top - next_top);
    sum = sum * keep + piece.sum * take;
    top = next_top;
  }
};
// An output from the sum of its values. head_gate: its head's factor, where a gate is one a head.
__device__ inline float gated(const Attend& p, int64_t t, int h, int c, float value, float head_gate) {
  if (p.gate_kind == OutputGate::kNone) return value;
  if (p.gate_kind == OutputGate::kSoftplusHead) return value * head_gate;
  return value * gate_factor(p.gate_kind, p.gate.data[t * p.gate.stride + h * value_width(p.kv) + c]);
}

// Numbers as operands: their first 11 bits of mantissa, and the rest.
__device__ inline void split_tf32(float x, uint32_t& high, uint32_t& low) {
  high = __float_as_uint(x) & 0xFFFFE000u;
  low = __float_as_uint(x - __uint_as_float(high));
}
struct RowOperand {
  uint32_t high[4], low[4];
  // Of rows g and g + 8, two numbers of lane q each.
  __device__ RowOperand(float a0, float a1, float b0, float b1) {
    split_tf32(a0, high[0], low[0]);
    split_tf32(b0, high[1], low[1]);
    split_tf32(a1, high[2], low[2]);
    split_tf32(b1, high[3], low[3]);
  }
};
struct ColumnOperand {
  uint32_t high[2], low[2];
  ColumnOperand() = default;
  __device__ ColumnOperand(float x0, float x1) {
    split_tf32(x0, high[0], low[0]);
    split_tf32(x1, high[1], low[1]);
  }
};
// The products of the high parts, and those of a high and a low part: apart, so that they do not wait for
// each other.
template <int kCount>
struct Sums {
  float high[kCount][4] = {}, mixed[kCount][4] = {};
  __device__ float of(int i, int v) const { return high[i][v] + mixed[i][v]; }
};
// b: of tiles first .. first + kTogether - 1.
template <int kCount, int kTogether>
__device__ inline void multiply(Sums<kCount>& sums, int first, const RowOperand& a,
                                const ColumnOperand (&b)[kTogether]) {
#pragma unroll
  for (int i = 0; i < kTogether; ++i) mma_tf32(sums.high[first + i], a.high, b[i].high);
#pragma unroll
  for (int i = 0; i < kTogether; ++i) mma_tf32(sums.mixed[first + i], a.high, b[i].low);
#pragma unroll
  for (int i = 0; i < kTogether; ++i) mma_tf32(sums.mixed[first + i], a.low, b[i].high);
}
// A step of kDimStep columns: a, b: those of rows g and g + 8; keys: of key g of each tile.
template <int kCount, int kTogether>
__device__ inline void multiply_keys(Sums<kCount>& sums, int first, const float4& a, const float4& b,
                                     const float4 (&keys)[kTogether]) {
  ColumnOperand columns[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) columns[i] = ColumnOperand(keys[i].x, keys[i].y);
  multiply(sums, first, RowOperand(a.x, a.y, b.x, b.y), columns);
#pragma unroll
  for (int i = 0; i < kTogether; ++i) columns[i] = ColumnOperand(keys[i].z, keys[i].w);
  multiply(sums, first, RowOperand(a.z, a.w, b.z, b.w), columns);
}

void attend_many(cudaStream_t stream, const Attend& p);
// How many rows are a tile of it; 0: it does not take these shapes.
int attend_many_rows(const Attend& p);

}  // namespace nibble::cuda
