// Attention over pages, of all visible positions or of chosen ones: a block for a row, some of its heads, and
// a piece or several (attend.cuh). The block that ends last joins the pieces. Bytes: keys and values once for
// each such block; heads that share them find them in L2.
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

// Heads of a block: with the key, two for each warp to prepare; and where blocks are few, one.
constexpr int64_t kMostHeads = kOperandRows - 1, kFewerHeads = kOperandRows / 2 - 1;
constexpr int64_t kFewBlocks = 320;
// With more rows a block takes several pieces: each block prepares its heads anew.
constexpr int64_t kEnoughBlocks = 256;

// Column c of head h from its pieces in their order (piece(i, value) gives one's sums and value).
template <class Piece>
__device__ float join(const Attend& p, int64_t t, int h, int c, float head_gate, int count, Piece piece) {
  Joined joined(p, h);
  float result = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float value, keep, take;
    joined.add(piece(i, value), keep, take);
    result = result * keep + value * take;
  }
  return gated(p, t, h, c, result / joined.sum, head_gate);
}

// The block's query heads and its row's own key, prepared, a warp some of them; and its row's value.
template <int kHeads>
__device__ void prepare_heads(const Attend& p, const PrepareAttendArgs& prepare,
                              const AttendShared<kHeads>& s, int t, int g, int first_head, int heads) {
  constexpr int kEach = kHeads / kAttendWarps;
  const auto dim = static_cast<int>(p.kv.head_dim), width = static_cast<int>(value_width(p.kv));
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  auto from = [&](int h) {
    return h == heads ? prepare.k.data + t * prepare.k.stride + g * dim
                      : prepare.q.data + t * prepare.q.stride + (first_head + h) * dim;
  };
  auto norm = [&](int h) { return h == heads ? prepare.k_norm : prepare.q_norm; };
  HeadAhead ahead[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int h = warp + i * kAttendWarps;
    if (h <= heads) ahead[i] = HeadAhead(prepare, t, from(h), norm(h));
  }
  const float* value = prepare.v.data + t * prepare.v.stride + g * width;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < width; c += kAttendThreads) s.value[c] = value[c];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int h = warp + i * kAttendWarps;
    if (h > heads) break;
    float* to = h == heads ? s.key : s.q + h * s.q_stride;
    prepare_head(prepare, t, from(h), norm(h), ahead[i], to);
    if (dim % kDimStep != 0 && lane < kDimStep - dim % kDimStep) to[dim + lane] = 0;
  }
}

// A block: a chunk of the heads that share keys and values, of one row, and every gridDim.y-th piece.
// kPrepares: the rows' queries, keys and values come from before prepare_attend, and no row sees another's.
// Then all else that is read (positions, page tables, what the cache has of earlier steps) was there before
// the kernel before began: it is asked for before the wait, and who has no piece leaves without one.
template <int kHeads, bool kPrepares>
__global__ void __launch_bounds__(kAttendThreads, 2)
    attend_kernel(const __grid_constant__ Attend p, const __grid_constant__ PrepareAttendArgs prepare) {
  extern __shared__ __align__(16) uint8_t shared[];
  dependency_launch();
  if constexpr (!kPrepares) dependency_wait();
  const auto dim = static_cast<int>(p.kv.head_dim), width = static_cast<int>(value_width(p.kv)),
             kv_heads = static_cast<int>(p.kv.kv_heads);
  const int group = p.heads / kv_heads, block = static_cast<int>(blockIdx.x);
  const int t = block / (kv_heads * p.chunks), g = block / p.chunks % kv_heads;
  if (p.tile_rows > 0 && is_of_one_sequence(p, (p.first + t) / p.tile_rows)) return;
  const int in_group = block % p.chunks * p.chunk_heads, first_head = g * group + in_group;
  const int heads = min(group - in_group, p.chunk_heads);
  const AttendShared<kHeads> s(shared, dim);
  const auto thread = static_cast<int>(threadIdx.x);
  const auto first_of_block = static_cast<int>(blockIdx.y), step = static_cast<int>(gridDim.y);
  // What does not depend on each other is asked for together: each answer takes the latency of L2.
  const float* q = p.q.data + t * p.q.stride + first_head * dim;
  const int fours = (dim + kDimStep - 1) / kDimStep * (kDimStep / 4);  // of a head
  auto load_q = [&](int i) { return load4(q + i / fours * dim, i % fours * 4, dim, p.vectors); };
  auto store_q = [&](int i, const float4& x) {
    *reinterpret_cast<float4*>(s.q + i / fours * s.q_stride + i % fours * 4) = x;
  };
  const bool has_q = !kPrepares && thread < heads * fours;
  const float4 first_q = has_q ? load_q(thread) : float4{0, 0, 0, 0};
  const bool gates_heads = p.gate_kind == OutputGate::kSoftplusHead && thread < heads;
  auto load_gate = [&] { return p.gate.data[t * p.gate.stride + first_head + thread]; };
  float gate = !kPrepares && gates_heads ? load_gate() : 0.0f;
  const int32_t slot = p.rows.slots_T[t];
  const int32_t* chosen = p.chosen.data + t * p.chosen.stride;
  const IndexRange range = range_of(p, t);
  const int first_piece = range.begin / kPiece, pieces = (range.end + kPiece - 1) / kPiece - first_piece;
  if (first_of_block > 0 && first_of_block >= pieces) return;
  if (has_q) store_q(thread, first_q);
  for (int i = thread + kAttendThreads; !kPrepares && i < heads * fours; i += kAttendThreads)
    store_q(i, load_q(i));

  float4 keys[kKeysAhead][kKeyTiles];  // the first that this lane takes
  float2 values[kValuesAhead][2];
  auto enter = [&](int piece) -> PieceIndices {
    const int at = (first_piece + piece) * kPiece;
    const PieceIndices indices = {max(range.begin - at, 0), min(range.end - at, kPiece),
                                  kPrepares && piece == pieces - 1 ? range.end - 1 - at : -1, p.vectors};
    for (int i = indices.first + thread; i < indices.last; i += kAttendThreads) {
      const int64_t token = token_index(p.kv, slot, p.counts != nullptr ? chosen[at + i] : at + i, g);
      s.tokens[i] = token;
      constexpr int kLine = 128 / sizeof(float);
#pragma unroll 1
      for (int c = 0; c < width; c += kLine) prefetch(p.kv.values + token * width + c);
    }
    __syncthreads();
    load_keys(p.kv, s, indices, keys);
    load_values(p.kv, s, indices, 0, values);
    return indices;
  };
  if constexpr (!kPrepares) {
    if (gates_heads) s.gates[thread] = gate_factor(p.gate_kind, gate);
    __syncthreads();
  }

  const int64_t head_stride = p.most_pieces * (2 + width);
  float* of_heads = p.pieces + (int64_t{t} * p.heads + first_head) * head_stride;
  auto write = [&](int h, int c, int count, auto of_piece) {
    p.out.data[t * p.out.stride + (first_head + h) * width + c] =
        join(p, t, first_head + h, c, s.gates[h], count, of_piece);
  };
  for (int piece = first_of_block; piece < pieces; piece += step) {
    const PieceIndices indices = enter(piece);
    if (kPrepares && piece == first_of_block) {
      const bool writes = block % p.chunks == 0 && first_of_block == 0;
      const int64_t token = writes ? token_index(p.kv, slot, range.end - 1, g) : 0;
      dependency_wait();
      if (gates_heads) gate = load_gate();
      prepare_heads(p, prepare, s, t, g, first_head, heads);
      if (gates_heads) s.gates[thread] = gate_factor(p.gate_kind, gate);
      __syncthreads();
#pragma unroll 1
      for (int c = thread; writes && c < dim; c += kAttendThreads) p.kv.keys[token * dim + c] = s.key[c];
#pragma unroll 1
      for (int c = thread; writes && c < width; c += kAttendThreads)
        p.kv.values[token * width + c] = s.value[c];
    }
    score(p.kv, p.scale, s, heads, indices, keys);
    __syncthreads();
    weigh(s, heads, indices);
    __syncthreads();
    sum_values(p.kv, s, heads, indices, width, values, [&](int h, int c, float value) {
      if (pieces == 1) {
        return write(h, c, 1, [&](int, float& of_piece) {
          of_piece = value;
          return s.weighed[h];
        });
      }
      float* out = of_heads + h * head_stride + int64_t{piece} * (2 + width);
      if (c == 0) out[0] = s.weighed[h].top, out[1] = s.weighed[h].sum;
      out[2 + c] = value;
    });
  }
  if (pieces == 1) return;
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
    write(h, c, pieces, [&](int piece, float& value) {
      const float* at = of_heads + h * head_stride + int64_t{piece} * (2 + width);
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
  if (p.chunk_heads <= kFewerHeads) {
    launch<kOperandRows / 2, kPrepares>(stream, p, prepare, grid);
  } else {
    launch<kOperandRows, kPrepares>(stream, p, prepare, grid);
  }
}

// How many pieces a row can have: its visible or chosen indices may begin in the middle of one.
int64_t most_pieces(const AttendArgs& args, const Selection* selection) {
  if (selection != nullptr) return ceil_div(selection->positions.cols, kPiece);
  const int64_t known = args.kv.table_pages * args.kv.page_tokens;
  return args.window > 0 ? ceil_div(std::min(args.window, known), kPiece) + 1 : ceil_div(known, kPiece);
}

RowsOfStep slice(const RowsOfStep& rows, int64_t first, int64_t count) {
  RowsOfStep some = rows;
  some.count = count, some.positions_T += first, some.slots_T += first;
  return some;
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
  Attend p{.q = args.q,
           .kv = args.kv,
           .rows = args.rows,
           .window = args.window,
           .scale = args.scale,
           .sinks = args.sinks_H,
           .gate_kind = args.gate_kind,
           .gate = args.gate,
           .out = args.out,
           .heads = static_cast<int>(heads),
           .chunks = static_cast<int>(chunks),
           .chunk_heads = static_cast<int>(ceil_div(group, chunks)),
           .pieces = scratch,
           .most_pieces = most_pieces(args, selection),
           .arrived = arrived,
           .all_rows = static_cast<int>(args.q.rows),
           .all_slots = args.rows.slots_T};
  auto aligned = [](const void* p, int64_t stride) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 4 == 0;
  };
  p.vectors = aligned(args.q.data, args.q.stride) && aligned(args.kv.keys, args.kv.head_dim) &&
              aligned(args.kv.values, args.kv.value_width());
  if (prepare == nullptr && selection == nullptr) p.tile_rows = attend_many_rows(p);
  if (p.tile_rows > 0) {
    attend_many(stream, p);
    if (args.rows.one_sequence) return check_launch("attend", args.q.rows, p.heads, args.kv.head_dim);
  }
  for (int64_t first = 0; first < args.q.rows; first += scratch_rows) {
    const int64_t rows = std::min(scratch_rows, args.q.rows - first);
    p.first = static_cast<int>(first);
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
