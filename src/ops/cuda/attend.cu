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
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/prepare_attend.cuh"
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

// Of a piece and head.
struct Weighed {
  float top, sum;  // the largest score; of exp(score - top)
};

// A block's shared memory.
template <int kHeads, bool kPrepares>
struct Shared {
  float* q;        // [kHeads, K], K rounded up to 4
  float* key;      // [K] of the row itself, where it is prepared here
  float* weights;  // [kHeads, kPiece]
  float* sums;     // [kWarps, kHeads, kColumns]
  static constexpr int kSmallBytes = (kHeads * 12 + 4 + 15) / 16 * 16;  // weighed, gates, is_last
  int64_t* tokens;                                                      // [kPiece]
  Weighed* weighed;                                                     // [kHeads]
  float* gates;                                                         // [kHeads]
  bool* is_last;
  int q_stride;

  __device__ Shared(void* base, int64_t dim) : q_stride(static_cast<int>(dim + 3) / 4 * 4) {
    tokens = static_cast<int64_t*>(base);
    weighed = reinterpret_cast<Weighed*>(tokens + kPiece);
    gates = reinterpret_cast<float*>(weighed + kHeads);
    is_last = reinterpret_cast<bool*>(gates + kHeads);
    sums = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(weighed) + kSmallBytes);
    weights = sums + kWarps * kHeads * kColumns;
    q = weights + kHeads * kPiece;
    key = q + kHeads * q_stride;
  }
  static int64_t bytes(int64_t dim) {
    return kPiece * 8 + kSmallBytes +
           (kWarps * kHeads * kColumns + kHeads * kPiece + (kHeads + kPrepares) * ((dim + 3) / 4 * 4)) * 4;
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

// A token's vector of `width` elements; kPrepares: token kOwn has its own.
constexpr int64_t kOwn = -1;
template <bool kPrepares>
__device__ const float* row_of(const float* rows, int64_t token, int64_t width, const float* own) {
  return kPrepares && token == kOwn ? own : rows + token * width;
}

// The scores of a piece, four positions of a warp at a time, whose loads are on their way together: lane l
// takes columns 4l to 4l + 3, and every kColumns further.
template <int kHeads, bool kPrepares>
__device__ void score(const Attend& p, const Shared<kHeads, kPrepares>& s, int heads, int count) {
  const int64_t dim = p.kv.head_dim;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int first = static_cast<int>(warp) * 4; first < count; first += kWarps * 4) {
    float sums[kHeads][4] = {};
    for (int64_t c = 4 * lane; c < dim; c += kColumns) {
      float4 keys[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        keys[j] =
            load4(row_of<kPrepares>(p.kv.keys, s.tokens[min(first + j, count - 1)], dim, s.key), c, dim);
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

// exp(score - the piece's largest) in place: a warp a head.
template <int kHeads, bool kPrepares>
__device__ void weigh(const Shared<kHeads, kPrepares>& s, int heads, int count) {
  const int head = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
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
  if (lane == 0) s.weighed[head] = {top, sum};
}

// put(head, column, sum of weight * value) of a piece (own_value: that of token kOwn): a warp takes every
// kWarps-th position; then the warps' sums in their order.
template <int kHeads, bool kPrepares, class Put>
__device__ void sum_values(const Attend& p, const Shared<kHeads, kPrepares>& s, int heads, int count,
                           int width, const float* own_value, Put put) {
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int begin = 0; begin < width; begin += kColumns) {
    float4 sums[kHeads] = {};
#pragma unroll 4
    for (int i = static_cast<int>(warp); i < count; i += kWarps) {
      const float4 value =
          load4(row_of<kPrepares>(p.kv.values, s.tokens[i], width, own_value), begin + 4 * lane, width);
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
      const int c = begin + i % kColumns;
      float total = 0;
      for (int w = 0; w < kWarps; ++w) total += s.sums[w * kHeads * kColumns + i];
      if (c < width) put(i / kColumns, c, total);
    }
    __syncthreads();
  }
}

// Column c of head h from its pieces in their order (piece(i, value) gives one's sums and value), the sink
// and the gate (head_gate: its factor, where it is one a head).
template <class Piece>
__device__ void join(const Attend& p, int64_t t, int h, int c, float head_gate, int count, Piece piece) {
  float top = p.sinks != nullptr ? p.sinks[h] : -INFINITY;
  float sum = p.sinks != nullptr ? 1.0f : 0.0f;  // the sink itself
  float result = 0;
  for (int i = 0; i < count; ++i) {
    float value;
    const Weighed weighed = piece(i, value);
    const float next_top = fmaxf(top, weighed.top);
    const float keep = expf(top - next_top), take = expf(weighed.top - next_top);
    sum = sum * keep + weighed.sum * take;
    result = result * keep + value * take;
    top = next_top;
  }
  result /= sum;
  const auto width = value_width(p.kv);
  if (p.gate_kind == OutputGate::kSoftplusHead) {
    result *= head_gate;
  } else if (p.gate_kind != OutputGate::kNone) {
    result *= gate_factor(p.gate_kind, p.gate.data[t * p.gate.stride + h * width + c]);
  }
  p.out.data[t * p.out.stride + h * width + c] = result;
}

// The block's query heads and its row's own key, prepared: a warp a head.
template <int kHeads>
__device__ void prepare_heads(const Attend& p, const PrepareAttendArgs& prepare,
                              const Shared<kHeads, true>& s, int t, int g, int first_head, int heads) {
  const auto dim = static_cast<int>(p.kv.head_dim), lane = static_cast<int>(threadIdx.x % kWarp);
  for (int h = static_cast<int>(threadIdx.x / kWarp); h <= heads; h += kWarps) {
    const bool is_key = h == heads;
    float* to = is_key ? s.key : s.q + h * s.q_stride;
    prepare_head(prepare, t,
                 is_key ? prepare.k.data + t * prepare.k.stride + g * dim
                        : prepare.q.data + t * prepare.q.stride + (first_head + h) * dim,
                 is_key ? prepare.k_norm : prepare.q_norm, to);
    if (dim + lane < s.q_stride) to[dim + lane] = 0;
  }
}

// A block: a chunk of the heads that share keys and values, of one row, and every gridDim.y-th piece.
// kPrepares: the rows' queries, keys and values come from before prepare_attend, and no row sees another's.
template <int kHeads, bool kPrepares>
__global__ void __launch_bounds__(kThreads) attend_kernel(Attend p, PrepareAttendArgs prepare) {
  extern __shared__ __align__(16) uint8_t shared[];
  after_kernel_before();
  const auto dim = static_cast<int>(p.kv.head_dim), width = static_cast<int>(value_width(p.kv)),
             kv_heads = static_cast<int>(p.kv.kv_heads);
  const int group = p.heads / kv_heads, block = static_cast<int>(blockIdx.x);
  const int t = block / (kv_heads * p.chunks), g = block / p.chunks % kv_heads;
  const int in_group = block % p.chunks * p.chunk_heads, first_head = g * group + in_group;
  const int heads = min(group - in_group, p.chunk_heads);
  const Shared<kHeads, kPrepares> s(shared, dim);
  const int thread = static_cast<int>(threadIdx.x);
  const auto first_of_block = static_cast<int>(blockIdx.y), step = static_cast<int>(gridDim.y);
  // What does not depend on each other is asked for together: each answer takes the latency of L2.
  const float* q = p.q.data + t * p.q.stride + first_head * dim;
  const int fours = s.q_stride / 4;  // of a head
  auto load_q = [&](int i) { return load4(q + i / fours * dim, i % fours * 4, dim); };
  const bool has_q = !kPrepares && thread < heads * fours;
  const float4 first_q = has_q ? load_q(thread) : float4{0, 0, 0, 0};
  const bool gates_heads = p.gate_kind == OutputGate::kSoftplusHead && thread < heads;
  const float gate = gates_heads ? p.gate.data[t * p.gate.stride + first_head + thread] : 0.0f;
  const int32_t slot = p.rows.slots_T[t];
  const int32_t* chosen = p.chosen.data + t * p.chosen.stride;
  const Range range = range_of(p, t);
  const int first_piece = range.begin / kPiece, pieces = (range.end + kPiece - 1) / kPiece - first_piece;
  if (first_of_block > 0 && first_of_block >= pieces) return;
  auto* shared_q = reinterpret_cast<float4*>(s.q);
  if (has_q) shared_q[thread] = first_q;
  for (int i = thread + kThreads; !kPrepares && i < heads * fours; i += kThreads) shared_q[i] = load_q(i);
  if (gates_heads) s.gates[thread] = gate_factor(p.gate_kind, gate);
  const float* own_value = nullptr;
  if constexpr (kPrepares) {
    own_value = prepare.v.data + t * prepare.v.stride + g * width;
    prepare_heads(p, prepare, s, t, g, first_head, heads);
    if (block % p.chunks == 0 && first_of_block == 0) {
      const int64_t token = token_index(p.kv, slot, range.end - 1, g);
      __syncthreads();
      for (int c = thread; c < dim; c += kThreads) p.kv.keys[token * dim + c] = s.key[c];
      for (int c = thread; c < width; c += kThreads) p.kv.values[token * width + c] = own_value[c];
    }
  }

  const int64_t head_stride = p.most_pieces * (2 + width);
  float* of_heads = p.pieces + (int64_t{t} * p.heads + first_head) * head_stride;
  for (int piece = first_of_block; piece < pieces; piece += step) {
    const int at = (first_piece + piece) * kPiece, from = max(at, range.begin);
    const int count = min(at + kPiece, range.end) - from;
    for (int i = thread; i < count; i += kThreads) {
      if (kPrepares && from + i + 1 == range.end) {
        s.tokens[i] = kOwn;
        continue;
      }
      const int64_t token = token_index(p.kv, slot, p.counts != nullptr ? chosen[from + i] : from + i, g);
      s.tokens[i] = token;
      constexpr int kLine = 128 / sizeof(float);
      for (int c = 0; c < width; c += kLine) prefetch(p.kv.values + token * width + c);
    }
    __syncthreads();
    score(p, s, heads, count);
    __syncthreads();
    weigh(s, heads, count);
    __syncthreads();
    if (pieces == 1) {
      sum_values(p, s, heads, count, width, own_value, [&](int h, int c, float value) {
        join(p, t, first_head + h, c, s.gates[h], 1, [&](int, float& of_piece) {
          of_piece = value;
          return s.weighed[h];
        });
      });
      return;
    }
    sum_values(p, s, heads, count, width, own_value, [&](int h, int c, float value) {
      float* out = of_heads + h * head_stride + piece * (2 + width);
      if (c == 0) out[0] = s.weighed[h].top, out[1] = s.weighed[h].sum;
      out[2 + c] = value;
    });
  }
  // sum_values ends with a barrier: what the block wrote is ordered before the fence of its first thread.
  const auto blocks = static_cast<uint32_t>(min(pieces, step));
  if (blocks > 1) {
    if (thread == 0) {
      __threadfence();
      *s.is_last = atomicAdd(p.arrived + block, 1) == blocks - 1;
      if (*s.is_last) p.arrived[block] = 0;
      __threadfence();
    }
    __syncthreads();
    if (!*s.is_last) return;
  }
  for (int i = thread; i < heads * width; i += kThreads) {
    const int h = i / width, c = i % width;
    join(p, t, first_head + h, c, s.gates[h], pieces, [&](int piece, float& value) {
      const float* at = of_heads + h * head_stride + piece * (2 + width);
      value = __ldcg(at + 2 + c);
      return Weighed{__ldcg(at), __ldcg(at + 1)};
    });
  }
}

template <int kHeads, bool kPrepares>
void launch(cudaStream_t stream, const Attend& p, const PrepareAttendArgs& prepare, dim3 grid) {
  const int64_t shared = Shared<kHeads, kPrepares>::bytes(p.kv.head_dim);
  check(cudaFuncSetAttribute(attend_kernel<kHeads, kPrepares>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared)),
        "attend");
  launch_early(attend_kernel<kHeads, kPrepares>, grid, kThreads, static_cast<size_t>(shared), stream, p,
               prepare);
}
template <bool kPrepares>
void launch(cudaStream_t stream, const Attend& p, const PrepareAttendArgs& prepare, dim3 grid) {
  if (p.chunk_heads == 1) {
    launch<1, kPrepares>(stream, p, prepare, grid);
  } else if (p.chunk_heads <= kMostHeads / 2) {
    launch<kMostHeads / 2, kPrepares>(stream, p, prepare, grid);
  } else {
    launch<kMostHeads, kPrepares>(stream, p, prepare, grid);
  }
}

// How many pieces a row can have: its visible or chosen indices may begin in the middle of one.
int64_t most_pieces(const AttendArgs& args, const Selection* selection) {
  if (selection != nullptr) return ceil_div(selection->positions.cols, kPiece);
  const int64_t known = args.kv.table_pages * args.kv.page_tokens;
  return ceil_div(args.window > 0 ? std::min(args.window, known) : known, kPiece) + 1;
}

RowsOfStep slice(const RowsOfStep& rows, int64_t first, int64_t count) {
  return {count, rows.positions_T + first, rows.slots_T + first, rows.one_a_sequence};
}

}  // namespace

int64_t attend_row_scratch(const AttendArgs& args, const Selection* selection) {
  return args.q.cols / args.kv.head_dim * most_pieces(args, selection) * (2 + args.kv.value_width());
}

void attend(cudaStream_t stream, const AttendArgs& args, const Selection* selection,
            const PrepareAttendArgs* prepare, float* scratch, int64_t scratch_rows, uint32_t* arrived) {
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
    p.rows = slice(args.rows, first, rows);
    if (selection != nullptr) {
      p.chosen = selection->positions.slice(first, rows);
      p.counts = selection->counts + first;
    }
    const int64_t blocks = rows * args.kv.kv_heads * chunks;
    const int64_t at_once = std::clamp<int64_t>(ceil_div(kEnoughBlocks, blocks), 1, p.most_pieces);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(at_once));
    if (prepare == nullptr) {
      launch<false>(stream, p, {}, grid);
      continue;
    }
    PrepareAttendArgs of_rows = *prepare;
    of_rows.q = prepare->q.slice(first, rows);
    of_rows.k = prepare->k.slice(first, rows);
    of_rows.v = prepare->v.slice(first, rows);
    of_rows.rope_table = prepare->rope_table.slice(first, rows);
    launch<true>(stream, p, of_rows, grid);
  }
  check_launch("attend", args.q.rows, p.heads, args.kv.head_dim);
}

}  // namespace nibble::cuda
