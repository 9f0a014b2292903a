// Attention of many rows of one sequence, as in a prompt (attend.cuh): a block has a tile of rows and all
// heads on the same keys and values, as 128 rows of an operand, and goes over the pieces that any of them
// looks at. Keys and values of a piece come to shared memory once for all of them: keys while the values
// before are multiplied, values while the keys are.
//
// A warp has 16 rows of the operand. The layout of a product's sums is that of the next product's operand if
// its two indices of a lane are two beside each other (FlashAttention-2 does so): weights stay in registers.
#include <algorithm>

#include "base/numbers.h"
#include "ops/cuda/attend.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kTileRows = kAttendWarps * kOperandRows;
constexpr int kStepsTogether = 4;  // between branches: products that do not wait for each other

// Rows in shared memory lie so that lanes read from all banks.
template <int kDim>
struct ManyShared {
  static constexpr int kKeyStride = kDim + 16, kValueStride = kDim + 4;
  float q[kTileRows * kKeyStride], keys[kPiece * kKeyStride], values[kPiece * kValueStride];
  int64_t tokens[2][kPiece];  // of this piece and the next; below 0: none
  int begin, end;
};

// One row of the operand, of a lane.
struct OperandRow {
  int head = 0;
  IndexRange range;  // empty: no such row
};

template <int kDim>
__global__ void __launch_bounds__(kAttendThreads, 1) attend_many_kernel(const __grid_constant__ Attend p) {
  constexpr int kFours = kDim / 4, kSteps = kDim / kDimStep, kUnits = kDim / 32;
  using Shared = ManyShared<kDim>;
  extern __shared__ __align__(16) uint8_t shared[];
  Shared& s = *reinterpret_cast<Shared*>(shared);
  dependency_launch();
  dependency_wait();
  // The last rows look at most: they come first.
  const auto kv_heads = static_cast<int>(p.kv.kv_heads), block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int tile = block / kv_heads, kv_head = block % kv_heads;
  if (!is_of_one_sequence(p, tile)) return;
  const int group = p.heads / kv_heads, t0 = tile * p.tile_rows;
  const int rows = min(p.tile_rows, p.all_rows - t0);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int g = lane / 4, q = lane % 4;
  const int32_t slot = p.all_slots[t0];

  if (thread == 0) s.begin = INT_MAX, s.end = 0;
  __syncthreads();
  if (thread < rows) {
    const IndexRange range = range_of(p, t0 + thread);
    atomicMin(&s.begin, range.begin);
    atomicMax(&s.end, range.end);
  }
  for (int i = thread; i < kTileRows * kFours; i += kAttendThreads) {
    const int m = i / kFours, c = i % kFours * 4, t = t0 + m / group, head = kv_head * group + m % group;
    float* to = s.q + m * Shared::kKeyStride + c;
    const bool is_row = m < rows * group;
    copy_later_16(to, is_row ? p.q.data + t * p.q.stride + head * kDim + c : p.q.data, is_row);
  }
  OperandRow row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = warp * kOperandRows + half * 8 + g;
    if (m >= rows * group) continue;
    row[half] = {kv_head * group + m % group, range_of(p, t0 + m / group)};
  }
  __syncthreads();
  const int begin = s.begin, end = s.end;
  const int first_piece = begin / kPiece, pieces = (end + kPiece - 1) / kPiece;

  auto find_tokens = [&](int piece) {
    const int position = piece * kPiece + thread;
    if (thread < kPiece)
      s.tokens[piece % 2][thread] =
          position >= begin && position < end ? token_index(p.kv, slot, position, kv_head) : -1;
  };
  auto bring = [&](const float* from, float* to, int stride, int piece) {
    for (int i = thread; i < kPiece * kFours; i += kAttendThreads) {
      const int64_t token = s.tokens[piece % 2][i / kFours];
      copy_later_16(to + i / kFours * stride + i % kFours * 4,
                    from + (token < 0 ? 0 : token * kDim + i % kFours * 4), token >= 0);
    }
  };
  find_tokens(first_piece);
  __syncthreads();
  bring(p.kv.keys, s.keys, Shared::kKeyStride, first_piece);
  copies_end_group();

  float result[kUnits * 4][4] = {};  // of eight columns each
  Joined joined[2] = {Joined(p, row[0].head), Joined(p, row[1].head)};
  for (int piece = first_piece; piece < pieces; ++piece) {
    bring(p.kv.values, s.values, Shared::kValueStride, piece);
    copies_end_group();
    copies_wait_but<1>();
    __syncthreads();

    Sums<kPieceSteps> scores;
    // What this warp's rows look at of the piece.
    int first[2], last[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      first[half] = row[half].range.begin - piece * kPiece, last[half] = row[half].range.end - piece * kPiece;
    const bool none = row[0].range.end == 0 && row[1].range.end == 0;
    const int warp_last = __reduce_max_sync(kAllLanes, none ? INT_MIN : max(last[0], last[1]));
    const int warp_first = __reduce_min_sync(kAllLanes, none                    ? INT_MAX
                                                        : row[1].range.end == 0 ? first[0]
                                                                                : min(first[0], first[1]));
    auto is_looked_at = [&](int index, int count) { return index < warp_last && index + count > warp_first; };
    const float* const own_q = s.q + (warp * kOperandRows + g) * Shared::kKeyStride + 4 * q;
    const float* const own_keys = s.keys + g * Shared::kKeyStride + 4 * q;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const float4 a = *reinterpret_cast<const float4*>(own_q + step * kDimStep);
      const float4 b = *reinterpret_cast<const float4*>(own_q + 8 * Shared::kKeyStride + step * kDimStep);
#pragma unroll
      for (int n = 0; n < kPieceSteps; n += kStepsTogether) {
        if (!is_looked_at(n * kIndexStep, kStepsTogether * kIndexStep)) continue;
        float4 keys[kStepsTogether];
#pragma unroll
        for (int i = 0; i < kStepsTogether; ++i)
          keys[i] =
              *reinterpret_cast<const float4*>(own_keys + (n + i) * 8 * Shared::kKeyStride + step * kDimStep);
        multiply_keys(scores, n, a, b, keys);
      }
    }
    if (piece + 1 < pieces) find_tokens(piece + 1);
    __syncthreads();  // keys are read
    if (piece + 1 < pieces) bring(p.kv.keys, s.keys, Shared::kKeyStride, piece + 1);
    copies_end_group();

    float weights[kPieceSteps][4], keep[2], take[2];
    const bool looks[2] = {first[0] < kPiece && last[0] > 0, first[1] < kPiece && last[1] > 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kPieceSteps; ++n) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int i = n * kIndexStep + 2 * q + v;
          const float x =
              i >= first[half] && i < last[half] ? scores.of(n, 2 * half + v) * p.scale : -INFINITY;
          weights[n][2 * half + v] = x;
          top = fmaxf(top, x);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      float eights[kPieceSteps / 2];  // as weigh() adds them
#pragma unroll
      for (int n = 0; n < kPieceSteps; ++n) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          float& x = weights[n][2 * half + v];
          x = looks[half] ? expf(x - top) : 0.0f;
        }
      }
      constexpr int kHalf = kPieceSteps / 2;
#pragma unroll
      for (int n = 0; n < kHalf; ++n)
        eights[n] = ((weights[n][2 * half] + weights[n][2 * half + 1]) + weights[n + kHalf][2 * half]) +
                    weights[n + kHalf][2 * half + 1];
#pragma unroll
      for (int distance = 1; distance < kHalf; distance *= 2) {
#pragma unroll
        for (int n = 0; n < kHalf; n += 2 * distance) eights[n] += eights[n + distance];
      }
      float sum = eights[0] + __shfl_xor_sync(kAllLanes, eights[0], 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (looks[half]) joined[half].add({top, sum}, keep[half], take[half]);
    }
    copies_wait_but<1>();
    __syncthreads();

    const float* const own_values = s.values + 2 * q * Shared::kValueStride + 4 * g;
    // Not unrolled, since the instructions of a piece would not stay in the cache: results take turns
    // instead.
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      Sums<4> sums;
#pragma unroll
      for (int group = 0; group < kPieceSteps; group += kStepsTogether) {
        if (!is_looked_at(group * kIndexStep, kStepsTogether * kIndexStep)) continue;
#pragma unroll
        for (int n = group; n < group + kStepsTogether; ++n) {
          const float* at = own_values + n * kIndexStep * Shared::kValueStride + unit * 32;
          const float4 x = *reinterpret_cast<const float4*>(at);
          const float4 y = *reinterpret_cast<const float4*>(at + Shared::kValueStride);
          const ColumnOperand columns[4] = {{x.x, y.x}, {x.y, y.y}, {x.z, y.z}, {x.w, y.w}};
          const auto& w = weights[n];
          multiply(sums, 0, RowOperand(w[0], w[1], w[2], w[3]), columns);
        }
      }
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        float joined_now[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          joined_now[i] =
              looks[v / 2] ? result[i][v] * keep[v / 2] + sums.of(i, v) * take[v / 2] : result[i][v];
#pragma unroll
        for (int i = 0; i < kUnits * 4 - 4; ++i) result[i][v] = result[i + 4][v];
#pragma unroll
        for (int i = 0; i < 4; ++i) result[kUnits * 4 - 4 + i][v] = joined_now[i];
      }
    }
    __syncthreads();  // values are read
  }

  // Through the place of the warp's queries, so that few instructions write all.
  float* const own = s.q + warp * kOperandRows * Shared::kKeyStride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kUnits * 4; ++i) {
#pragma unroll
      for (int v = 0; v < 2; ++v)
        own[(half * 8 + g) * Shared::kKeyStride + i / 4 * 32 + 8 * q + v * 4 + i % 4] =
            result[i][2 * half + v];
    }
  }
  __syncwarp();
  float gate_of_lane = 1;  // of row `lane`
  if (const int m = warp * kOperandRows + lane;
      p.gate_kind == OutputGate::kSoftplusHead && lane < kOperandRows && m < rows * group) {
    const int64_t t = t0 + m / group;
    gate_of_lane = gate_factor(p.gate_kind, p.gate.data[t * p.gate.stride + kv_head * group + m % group]);
  }
#pragma unroll 1
  for (int i = 0; i < kOperandRows; ++i) {
    const int m = warp * kOperandRows + i, from = i % 8 * 4;
    const float sum = __shfl_sync(kAllLanes, i < 8 ? joined[0].sum : joined[1].sum, from);
    if (m >= rows * group) break;
    const int t = t0 + m / group, head = kv_head * group + m % group;
    const float head_gate = __shfl_sync(kAllLanes, gate_of_lane, i);
#pragma unroll 1
    for (int c = lane; c < kDim; c += kWarp)
      p.out.data[t * p.out.stride + head * kDim + c] =
          gated(p, t, head, c, own[i * Shared::kKeyStride + c] / sum, head_gate);
  }
}

template <int kDim>
void launch(cudaStream_t stream, const Attend& p) {
  check(cudaFuncSetAttribute(attend_many_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(ManyShared<kDim>))),
        "attend");
  const auto grid = static_cast<unsigned>(p.kv.kv_heads * ceil_div(p.all_rows, p.tile_rows));
  launch_early(attend_many_kernel<kDim>, grid, kAttendThreads, sizeof(ManyShared<kDim>), stream, p);
}

}  // namespace

int attend_many_rows(const Attend& p) {
  constexpr int kFewestBlocks = 64;  // with fewer, pieces are better spread over blocks (attend_kernel)
  const int64_t dim = p.kv.head_dim, group = p.heads / p.kv.kv_heads;
  if ((dim != 64 && dim != 128) || p.kv.value_width() != dim || group > kTileRows || !p.vectors) return 0;
  const int64_t rows = kTileRows / group;
  if (p.all_rows < rows || ceil_div(p.all_rows, rows) * p.kv.kv_heads < kFewestBlocks) return 0;
  int device = 0, most_shared = 0;
  check(cudaGetDevice(&device), "attend");
  check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "attend");
  const size_t shared = dim == 64 ? sizeof(ManyShared<64>) : sizeof(ManyShared<128>);
  return static_cast<size_t>(most_shared) >= shared ? static_cast<int>(rows) : 0;
}

void attend_many(cudaStream_t stream, const Attend& p) {
  p.kv.head_dim == 64 ? launch<64>(stream, p) : launch<128>(stream, p);
}

}  // namespace nibble::cuda
