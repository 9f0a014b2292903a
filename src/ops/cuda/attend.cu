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
constexpr int kMostHeads = 8;            // of a block
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
  int heads = 0;
  int chunks = 0;           // of the heads that share keys and values: blocks
  int chunk_heads = 0;      // heads of a chunk but for the last
  float* pieces = nullptr;  // [T, H, most_pieces, 2 + value width]: top, sum, values
  int64_t most_pieces = 0;
  uint32_t* arrived = nullptr;  // [T, G, chunks] blocks that are done; zero between launches
};

// The indices [begin, end) that row t looks at.
struct Range {
  int begin = 0, end = 0;
};
__device__ Range range_of(const Attend& p, int64_t t) {
  if (p.counts != nullptr) return {0, p.counts[t]};
  const int end = p.rows.positions_T[t] + 1;
  return {p.window > 0 && end > p.window ? end - static_cast<int>(p.window) : 0, end};
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

// A block's shared memory.
template <int kHeads>
struct Shared {
  float* q;         // [kHeads, K], K rounded up to 4
  float* weights;   // [kHeads, kPiece]
  float* sums;      // [kWarps, kHeads, kColumns]
  int64_t* tokens;  // [kPiece]
  int q_stride;

  __device__ Shared(void* base, int64_t dim) : q_stride(static_cast<int>(dim + 3) / 4 * 4) {
    tokens = static_cast<int64_t*>(base);
    sums = reinterpret_cast<float*>(tokens + kPiece);
    weights = sums + kWarps * kHeads * kColumns;
    q = weights + kHeads * kPiece;
  }
  static int64_t bytes(int64_t dim) {
    return kPiece * 8 + (kWarps * kHeads * kColumns + kHeads * kPiece + kHeads * ((dim + 3) / 4 * 4)) * 4;
  }
};

// Four numbers of each lane summed over the warp: lanes 0, 8, 16 and 24 have the four sums.
__device__ float sum_four(const float (&x)[4], unsigned lane) {
  const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
  const float a = (upper ? x[2] : x[0]) + __shfl_xor_sync(kAllLanes, upper ? x[0] : x[2], 16);
  const float b = (upper ? x[3] : x[1]) + __shfl_xor_sync(kAllLanes, upper ? x[1] : x[3], 16);
  float sum = (odd ? b : a) + __shfl_xor_sync(kAllLanes, odd ? a : b, 8);
  for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

// The scores of a piece, four positions of a warp at a time, whose loads are on their way together: lane l
// takes columns 4l to 4l + 3, and every kColumns further.
template <int kHeads>
__device__ void score(const Attend& p, const Shared<kHeads>& s, int heads, int count) {
  const int64_t dim = p.kv.head_dim;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int first = static_cast<int>(warp) * 4; first < count; first += kWarps * 4) {
    float sums[kHeads][4] = {};
    for (int64_t c = 4 * lane; c < dim; c += kColumns) {
      float4 keys[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        keys[j] = load4(p.kv.keys + s.tokens[min(first + j, count - 1)] * dim, c, dim);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) break;
        const float4 q = *reinterpret_cast<const float4*>(s.q + h * s.q_stride + c);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[h][j] = fmaf(q.x, keys[j].x, sums[h][j]);
          sums[h][j] = fmaf(q.y, keys[j].y, sums[h][j]);
          sums[h][j] = fmaf(q.z, keys[j].z, sums[h][j]);
          sums[h][j] = fmaf(q.w, keys[j].w, sums[h][j]);
        }
      }
    }
    const int mine = first + static_cast<int>(lane / 8);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      const float sum = sum_four(sums[h], lane);
      if (lane % 8 == 0 && mine < count) s.weights[h * kPiece + mine] = sum * p.scale;
    }
  }
}

// exp(score - the piece's largest) in place, and the piece's largest and sum: a warp a head.
template <int kHeads>
__device__ void weigh(const Shared<kHeads>& s, int heads, int count, float* pieces, int64_t head_stride) {
  const int head = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  static_assert(kHeads <= kWarps);
  if (head >= heads) return;
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
  if (lane == 0) {
    pieces[head * head_stride] = top;
    pieces[head * head_stride + 1] = sum;
  }
}

// The piece's sums of weight * value: a warp takes every kWarps-th position; then the warps' sums in their
// order.
template <int kHeads>
__device__ void sum_values(const Attend& p, const Shared<kHeads>& s, int heads, int count, int64_t width,
                           float* pieces, int64_t head_stride) {
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t begin = 0; begin < width; begin += kColumns) {
    float4 sums[kHeads] = {};
#pragma unroll 4
    for (int i = static_cast<int>(warp); i < count; i += kWarps) {
      const float4 value = load4(p.kv.values + s.tokens[i] * width, begin + 4 * lane, width);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = h < heads ? s.weights[h * kPiece + i] : 0.0f;
        sums[h].x = fmaf(weight, value.x, sums[h].x);
        sums[h].y = fmaf(weight, value.y, sums[h].y);
        sums[h].z = fmaf(weight, value.z, sums[h].z);
        sums[h].w = fmaf(weight, value.w, sums[h].w);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      *reinterpret_cast<float4*>(s.sums + (warp * kHeads + h) * kColumns + 4 * lane) = sums[h];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < heads * kColumns; i += kThreads) {
      const int64_t c = begin + i % kColumns;
      float total = 0;
      for (int w = 0; w < kWarps; ++w) total += s.sums[w * kHeads * kColumns + i];
      if (c < width) pieces[i / kColumns * head_stride + 2 + c] = total;
    }
    __syncthreads();
  }
}

// The factor that a gate gives to column c of head h.
__device__ float gate_factor(const Attend& p, int64_t t, int h, int64_t c, int64_t width) {
  const float* gate = p.gate.data + t * p.gate.stride;
  const float g = gate[p.gate_kind == OutputGate::kSoftplusHead ? h : h * width + c];
  return p.gate_kind == OutputGate::kSigmoidElement ? sigmoid(g) : softplus(g);
}

// The pieces of each head in their order, the sink and the gate; s_gates: of the heads, where they have one
// each.
__device__ void join(const Attend& p, int64_t t, int first_head, int heads, int count, int width,
                     const float* s_gates) {
  for (int i = static_cast<int>(threadIdx.x); i < heads * width; i += kThreads) {
    const int h = first_head + i / width, c = i % width;
    const float* pieces = p.pieces + (t * p.heads + h) * p.most_pieces * (2 + width);
    float top = p.sinks != nullptr ? p.sinks[h] : -INFINITY;
    float sum = p.sinks != nullptr ? 1.0f : 0.0f;  // the sink itself
    float value = 0;
    for (int piece = 0; piece < count; ++piece, pieces += 2 + width) {
      const float piece_top = __ldcg(pieces), piece_sum = __ldcg(pieces + 1);
      const float next_top = fmaxf(top, piece_top);
      const float keep = expf(top - next_top), take = expf(piece_top - next_top);
      sum = sum * keep + piece_sum * take;
      value = value * keep + __ldcg(pieces + 2 + c) * take;
      top = next_top;
    }
    value /= sum;
    if (p.gate_kind == OutputGate::kSoftplusHead) {
      value *= s_gates[h - first_head];
    } else if (p.gate_kind != OutputGate::kNone) {
      value *= gate_factor(p, t, h, c, width);
    }
    p.out.data[t * p.out.stride + h * width + c] = value;
  }
}

// A block: a chunk of the heads that share keys and values, of one row, and every gridDim.y-th piece.
template <int kHeads>
__global__ void __launch_bounds__(kThreads) attend_kernel(Attend p) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ bool s_is_last;
  __shared__ float s_gates[kHeads];
  after_kernel_before();
  const auto dim = static_cast<int>(p.kv.head_dim), width = static_cast<int>(value_width(p.kv)),
             kv_heads = static_cast<int>(p.kv.kv_heads), block = static_cast<int>(blockIdx.x);
  const int group = p.heads / kv_heads;
  const int t = block / (kv_heads * p.chunks), g = block / p.chunks % kv_heads;
  const int in_group = block % p.chunks * p.chunk_heads, first_head = g * group + in_group;
  const int heads = min(group - in_group, p.chunk_heads);
  const int32_t slot = p.rows.slots_T[t];
  const int32_t* chosen = p.chosen.data + t * p.chosen.stride;
  const Range range = range_of(p, t);
  const int first_piece = range.begin / kPiece, pieces = (range.end + kPiece - 1) / kPiece - first_piece;
  const int thread = static_cast<int>(threadIdx.x);
  const auto first_of_block = static_cast<int>(blockIdx.y), step = static_cast<int>(gridDim.y);
  if (first_of_block > 0 && first_of_block >= pieces) return;
  const Shared<kHeads> s(shared, dim);
  const float* q = p.q.data + t * p.q.stride + first_head * dim;
  for (int i = thread; i < heads * s.q_stride; i += kThreads) {
    const int h = i / s.q_stride, c = i % s.q_stride;
    s.q[i] = c < dim ? q[h * dim + c] : 0.0f;
  }
  if (p.gate_kind == OutputGate::kSoftplusHead && thread < heads)
    s_gates[thread] = gate_factor(p, t, first_head + thread, 0, width);

  const int64_t head_stride = p.most_pieces * (2 + width);
  for (int piece = first_of_block; piece < pieces; piece += step) {
    const int at = (first_piece + piece) * kPiece, from = max(at, range.begin);
    const int count = min(at + kPiece, range.end) - from;
    for (int i = thread; i < count; i += kThreads)
      s.tokens[i] = token_index(p.kv, slot, p.counts != nullptr ? chosen[from + i] : from + i, g);
    __syncthreads();
    score(p, s, heads, count);
    __syncthreads();
    float* out = p.pieces + ((int64_t{t} * p.heads + first_head) * p.most_pieces + piece) * (2 + width);
    weigh(s, heads, count, out, head_stride);
    __syncthreads();
    sum_values(p, s, heads, count, width, out, head_stride);
  }
  // sum_values ends with a barrier: what the block wrote is ordered before the fence of its first thread.
  const auto blocks = static_cast<uint32_t>(min(pieces, step));
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
  join(p, t, first_head, heads, pieces, width, s_gates);
}

template <int kHeads>
void launch(cudaStream_t stream, const Attend& p, dim3 grid) {
  const int64_t shared = Shared<kHeads>::bytes(p.kv.head_dim);
  check(cudaFuncSetAttribute(attend_kernel<kHeads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared)),
        "attend");
  launch_early(attend_kernel<kHeads>, grid, kThreads, static_cast<size_t>(shared), stream, p);
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
  const int64_t heads = args.q.cols / args.kv.head_dim, group = heads / args.kv.kv_heads;
  const int64_t chunks = ceil_div(group, kMostHeads);
  Attend p{.kv = args.kv,
           .window = args.window,
           .scale = args.scale,
           .sinks = args.sinks_H,
           .gate_kind = args.gate_kind,
           .heads = static_cast<int>(heads),
           .chunks = static_cast<int>(chunks),
           .chunk_heads = static_cast<int>(ceil_div(group, chunks)),
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
    const int64_t blocks = rows * args.kv.kv_heads * chunks;
    const int64_t at_once = std::clamp<int64_t>(ceil_div(kEnoughBlocks, blocks), 1, p.most_pieces);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(at_once));
    if (p.chunk_heads == 1) {
      launch<1>(stream, p, grid);
    } else if (p.chunk_heads <= kMostHeads / 2) {
      launch<kMostHeads / 2>(stream, p, grid);
    } else {
      launch<kMostHeads>(stream, p, grid);
    }
  }
  check_launch("attend", args.q.rows, p.heads, args.kv.head_dim);
}

}  // namespace nibble::cuda
