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
#include "ops/cuda/attend_piece.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/prepare_attend.cuh"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

// Heads of a block: keys and values are read once for all of them, but few blocks take longer than more of
// fewer heads.
constexpr int kMostHeads = 9, kFewerHeads = 5;
constexpr int64_t kFewBlocks = 192;
constexpr int64_t kEnoughBlocks = 2048;  // for any GPU; with more rows, a block takes several pieces

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

// The block's query heads and its row's own key, prepared, a warp two of them; and its row's value.
template <int kHeads>
__device__ void prepare_heads(const Attend& p, const PrepareAttendArgs& prepare,
                              const AttendShared<kHeads>& s, int t, int g, int first_head, int heads) {
  static_assert(kHeads + 1 <= 2 * kAttendWarps);
  const auto dim = static_cast<int>(p.kv.head_dim), width = static_cast<int>(value_width(p.kv));
  const int first = static_cast<int>(threadIdx.x / kWarp), second = first + kAttendWarps;
  auto from = [&](int h) {
    return h == heads ? prepare.k.data + t * prepare.k.stride + g * dim
                      : prepare.q.data + t * prepare.q.stride + (first_head + h) * dim;
  };
  auto norm = [&](int h) { return h == heads ? prepare.k_norm : prepare.q_norm; };
  HeadAhead first_ahead, second_ahead;
  if (first <= heads) first_ahead = HeadAhead(prepare, t, from(first), norm(first));
  if (second <= heads) second_ahead = HeadAhead(prepare, t, from(second), norm(second));
  const float* value = prepare.v.data + t * prepare.v.stride + g * width;
  for (int c = static_cast<int>(threadIdx.x); c < width; c += kAttendThreads) s.value[c] = value[c];
  auto finish = [&](int h, const HeadAhead& ahead) {
    if (h > heads) return;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    float* to = h == heads ? s.key : s.q + h * s.q_stride;
    prepare_head(prepare, t, from(h), norm(h), ahead, to);
    if (dim + lane < s.q_stride) to[dim + lane] = 0;
  };
  finish(first, first_ahead);
  finish(second, second_ahead);
}

// A block: a chunk of the heads that share keys and values, of one row, and every gridDim.y-th piece.
// kPrepares: the rows' queries, keys and values come from before prepare_attend, and no row sees another's.
// Then all else that is read (positions, page tables, what the cache has of earlier steps) was there before
// the kernel before began: it is asked for before the wait, and who has no piece leaves without one.
template <int kHeads, bool kPrepares>
__global__ void __launch_bounds__(kAttendThreads, kHeads > kMostHeads / 2 ? 2 : 3)
    attend_kernel(const __grid_constant__ Attend p, const __grid_constant__ PrepareAttendArgs prepare) {
  extern __shared__ __align__(16) uint8_t shared[];
  dependency_launch();
  if constexpr (!kPrepares) dependency_wait();
  const auto dim = static_cast<int>(p.kv.head_dim), width = static_cast<int>(value_width(p.kv)),
             kv_heads = static_cast<int>(p.kv.kv_heads);
  const int group = p.heads / kv_heads, block = static_cast<int>(blockIdx.x);
  const int t = block / (kv_heads * p.chunks), g = block / p.chunks % kv_heads;
  const int in_group = block % p.chunks * p.chunk_heads, first_head = g * group + in_group;
  const int heads = min(group - in_group, p.chunk_heads);
  const AttendShared<kHeads> s(shared, dim);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  const auto first_of_block = static_cast<int>(blockIdx.y), step = static_cast<int>(gridDim.y);
  // What does not depend on each other is asked for together: each answer takes the latency of L2.
  const float* q = p.q.data + t * p.q.stride + first_head * dim;
  const int fours = s.q_stride / 4;  // of a head
  auto load_q = [&](int i) { return load4(q + i / fours * dim, i % fours * 4, dim); };
  const bool has_q = !kPrepares && thread < heads * fours;
  const float4 first_q = has_q ? load_q(thread) : float4{0, 0, 0, 0};
  const bool gates_heads = p.gate_kind == OutputGate::kSoftplusHead && thread < heads;
  auto load_gate = [&] { return p.gate.data[t * p.gate.stride + first_head + thread]; };
  float gate = !kPrepares && gates_heads ? load_gate() : 0.0f;
  const int32_t slot = p.rows.slots_T[t];
  const int32_t* chosen = p.chosen.data + t * p.chosen.stride;
  const Range range = range_of(p, t);
  const int first_piece = range.begin / kPiece, pieces = (range.end + kPiece - 1) / kPiece - first_piece;
  if (first_of_block > 0 && first_of_block >= pieces) return;
  auto* shared_q = reinterpret_cast<float4*>(s.q);
  if (has_q) shared_q[thread] = first_q;
  for (int i = thread + kAttendThreads; !kPrepares && i < heads * fours; i += kAttendThreads)
    shared_q[i] = load_q(i);

  float4 keys[kTogether], values[kTogether];  // the first that this warp takes
  auto enter = [&](int piece) -> PieceIndices {
    const int at = (first_piece + piece) * kPiece, from = max(at, range.begin);
    const int count = min(at + kPiece, range.end) - from;
    for (int i = thread; i < count; i += kAttendThreads) {
      const int64_t token = token_index(p.kv, slot, p.counts != nullptr ? chosen[from + i] : from + i, g);
      s.tokens[i] = token;
      constexpr int kLine = 128 / sizeof(float);
      if (i < kIndexStep) continue;  // asked for below
      for (int c = 0; c < width; c += kLine) prefetch(p.kv.values + token * width + c);
    }
    __syncthreads();
    if (warp * kTogether < count) load_rows(p.kv.keys, dim, s.tokens, count, warp * kTogether, 1, 0, keys);
    if (warp < count) load_rows(p.kv.values, width, s.tokens, count, warp, kAttendWarps, 0, values);
    return {count, kPrepares && piece == pieces - 1 ? count - 1 : -1};
  };
  PieceIndices indices;
  if (pieces > 0) indices = enter(first_of_block);
  if constexpr (kPrepares) {
    const bool writes = block % p.chunks == 0 && first_of_block == 0;
    const int64_t token = writes ? token_index(p.kv, slot, range.end - 1, g) : 0;
    dependency_wait();
    if (gates_heads) gate = load_gate();
    prepare_heads(p, prepare, s, t, g, first_head, heads);
    if (gates_heads) s.gates[thread] = gate_factor(p.gate_kind, gate);
    __syncthreads();
    for (int c = thread; writes && c < dim; c += kAttendThreads) p.kv.keys[token * dim + c] = s.key[c];
    for (int c = thread; writes && c < width; c += kAttendThreads)
      p.kv.values[token * width + c] = s.value[c];
  } else {
    if (gates_heads) s.gates[thread] = gate_factor(p.gate_kind, gate);
    __syncthreads();
  }

  const int64_t head_stride = p.most_pieces * (2 + width);
  float* of_heads = p.pieces + (int64_t{t} * p.heads + first_head) * head_stride;
  for (int piece = first_of_block; piece < pieces; piece += step) {
    if (piece > first_of_block) indices = enter(piece);
    score(p.kv, p.scale, s, heads, indices, keys);
    __syncthreads();
    weigh(s, heads, indices.count);
    __syncthreads();
    if (pieces == 1) {
      sum_values(p.kv, s, heads, indices, width, values, [&](int h, int c, float value) {
        join(p, t, first_head + h, c, s.gates[h], 1, [&](int, float& of_piece) {
          of_piece = value;
          return s.weighed[h];
        });
      });
      return;
    }
    sum_values(p.kv, s, heads, indices, width, values, [&](int h, int c, float value) {
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
  for (int i = thread; i < heads * width; i += kAttendThreads) {
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
  const int64_t shared = AttendShared<kHeads>::bytes(p.kv.head_dim, p.kv.value_width(), kPrepares);
  check(cudaFuncSetAttribute(attend_kernel<kHeads, kPrepares>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared)),
        "attend");
  launch_early(attend_kernel<kHeads, kPrepares>, grid, kAttendThreads, static_cast<size_t>(shared), stream, p,
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
  return args.window > 0 ? ceil_div(std::min(args.window, known), kPiece) + 1 : ceil_div(known, kPiece);
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
  const bool is_few = args.q.rows * args.kv.kv_heads * most_pieces(args, selection) <= kFewBlocks;
  const int64_t chunks = ceil_div(group, is_few ? kFewerHeads : kMostHeads);
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
