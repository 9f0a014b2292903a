// Few rows are routed and grouped by every multiprocessor for itself, at the beginning of moe_layer: no
// launch and no way through memory stands between the router's logits and the first weights.
#pragma once

#include "ops/cuda/moe_workspace.h"
#include "ops/cuda/primitives.cuh"
#include "ops/cuda/route_row.cuh"

namespace nibble::cuda {

inline constexpr int kFewRows = 128;

// What the grouping kernel would write to the workspace, in shared memory. A bit for each grouped row:
// `begins`, a row block begins with it; `wide`, and takes two tiles of tokens.
struct FewRows {
  RowBlock block[kFewRows];
  int row_token[kFewRows], grouped_row[kFewRows];
  int32_t ids[kFewRows];
  float weights[kFewRows];
  uint32_t begins[kFewRows / 32], wide[kFewRows / 32];
  float top[kFewTokens], sum[kFewTokens];  // of a row's scores
  Place gate_up_share[2], down_share[2];   // of this multiprocessor: begin and end
  int blocks;
};

// The grouping of this launch: in the workspace, or here.
struct Groups {
  const Workspace& w;
  const MoeDecodeArgs& args;
  const FewRows& few;
  bool are_few;
  const __nv_bfloat16* few_x;  // like w.x, in shared memory; null: they are in args.x

  __device__ int blocks() const { return are_few ? few.blocks : *w.blocks; }
  __device__ RowBlock block(int i) const { return are_few ? few.block[i] : w.block[i]; }
  __device__ int row_token(int row) const { return are_few ? few.row_token[row] : w.row_token[row]; }
  // Of this multiprocessor, end 0 or 1.
  __device__ Place share(bool down, int end) const {
    if (are_few) return (down ? few.down_share : few.gate_up_share)[end];
    return (down ? w.down_share : w.gate_up_share)[blockIdx.x + end];
  }
  // Of a token's a-th expert.
  __device__ int64_t grouped_row(int64_t t, int a) const {
    const int64_t row = t * args.shape.chosen + a;
    return are_few ? few.grouped_row[row] : w.grouped_row[row];
  }
  __device__ float weight(int64_t t, int a) const {
    return are_few ? few.weights[t * args.shape.chosen + a] : args.weights[t * args.weights_stride + a];
  }
};

// Where an expert's weights are.
struct ExpertTiles {
  const uint8_t *gate_up, *down;
};

// A key that may be among the chosen, and whose it is.
struct Candidate {
  uint32_t key;
  int expert;
};

// What the grouping here needs until it is done: of experts [E], and of rows [T, E].
struct FewScratch {
  ExpertTiles* tiles;
  float* bias;
  Candidate* candidates;
  float* scores;
  uint32_t* keys;
  __device__ FewScratch(uint8_t* shared, const MoeDecodeArgs& a)
      : tiles(reinterpret_cast<ExpertTiles*>(shared)),
        bias(reinterpret_cast<float*>(tiles + a.shape.experts)),
        candidates(reinterpret_cast<Candidate*>(bias + of_fours(a.shape.experts))),
        scores(reinterpret_cast<float*>(candidates + a.tokens * a.shape.experts)),
        keys(reinterpret_cast<uint32_t*>(scores + a.tokens * a.shape.experts)) {}
};
inline int few_rows_scratch(const MoeDecodeArgs& a) {
  return of_fours(a.shape.experts) * static_cast<int>(sizeof(ExpertTiles) + sizeof(float)) +
         a.tokens * a.shape.experts * static_cast<int>(sizeof(Candidate) + sizeof(float) + sizeof(uint32_t));
}

// By a warp: the `chosen` largest keys, of equal ones those of lower index: take(rank, expert). Each lane's
// best key tells a bound that so many keys reach; few others do, and of those each counts who comes before.
template <class Take>
__device__ inline void choose(const uint32_t* keys, int experts, int chosen, Candidate* candidates,
                              Take take) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint32_t best = 0, bound = 0;
#pragma unroll 8
  for (int e = lane; e < experts; e += kWarp) best = max(best, keys[e]);
  if (chosen <= min(kWarp, experts)) {
    int larger = 0;
#pragma unroll 8
    for (int other = 0; other < kWarp; ++other) larger += __shfl_sync(kAllLanes, best, other) > best ? 1 : 0;
    bound = __reduce_min_sync(kAllLanes, larger < chosen ? best : ~0u);
  }
  int count = 0;
#pragma unroll 4
  for (int first = 0; first < experts; first += kWarp) {
    const int e = first + lane;
    const uint32_t key = e < experts ? keys[e] : 0;
    const bool is_one = e < experts && key >= bound;
    const uint32_t ones = __ballot_sync(kAllLanes, is_one);
    if (is_one) candidates[count + __popc(ones & ((1u << lane) - 1))] = {key, e};
    count += __popc(ones);
  }
  __syncwarp();
  for (int c = lane; c < count; c += kWarp) {
    const Candidate mine = candidates[c];
    int rank = 0;
#pragma unroll 4
    for (int other = 0; other < count; ++other) {
      const uint32_t key = candidates[other].key;
      rank += key > mine.key || (key == mine.key && other < c) ? 1 : 0;
    }
    if (rank < chosen) take(rank, mine.expert);
  }
}

// Chooses the experts of all rows; what becomes their weights are scores so far. As route_row, in the same
// order of sums.
__device__ inline void choose_few(const RouteArgs& route, const FewScratch& scratch, FewRows& few) {
  const RouterSpec& spec = route.spec;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int tokens = static_cast<int>(route.ids.rows), chosen = static_cast<int>(route.ids.cols);
  const int experts = static_cast<int>(route.logits.cols);
  // What is a thread's own of [T, E], without a division: visit(t, e).
  auto for_own = [&](auto visit) {
    for (int t = 0, e = thread; t < tokens;) {
      if (e < experts) {
        visit(t, e);
        e += static_cast<int>(blockDim.x);
      } else {
        e -= experts, ++t;
      }
    }
  };
  for_own([&](int t, int e) {
    copy_later(scratch.scores + t * experts + e, route.logits.data + t * route.logits.stride + e);
  });
  copies_wait();
  __syncthreads();  // others wrote the bias of what is a thread's own
  if (spec.score == RouterScore::kSoftmaxAll) {
    if (warp < tokens) {
      const Scores scores{spec, scratch.scores + warp * experts};
      float top = -INFINITY, sum = 0;
      for (int e = lane; e < experts; e += kWarp) top = fmaxf(top, scores.logit(e));
      top = warp_max(top);
      for (int e = lane; e < lane + experts; e += kWarp)
        sum += warp_sum(e < experts ? exp_exactly(scores.logit(e) - top) : 0.0f);
      if (lane == 0) few.top[warp] = top, few.sum[warp] = sum;
    }
    __syncthreads();
  }
  for_own([&](int t, int e) {
    float* const scores = scratch.scores + t * experts;
    scores[e] = Scores{spec, scores, few.top[t], few.sum[t]}.score(e);
    scratch.keys[t * experts + e] = ordered(scores[e] + scratch.bias[e]);
  });
  __syncthreads();
  if (warp >= tokens) return;
  const int row = warp * experts;
  choose(scratch.keys + row, experts, chosen, scratch.candidates + row, [&](int rank, int e) {
    few.ids[warp * chosen + rank] = e;
    few.weights[warp * chosen + rank] = scratch.scores[row + e];
  });
}

// Rows in the stable order of (expert, token), row blocks, and this multiprocessor's shares of them, as the
// grouping kernel makes them. few.ids is there for all threads; begins and wide are zero.
__device__ inline void group_few(const MoeShape& s, int tokens, const ExpertTiles* tiles, FewRows& few) {
  constexpr int kOfRow = 2;  // threads that count for a row
  const int rows = tokens * s.chosen, row = static_cast<int>(threadIdx.x) / kOfRow;
  const int expert = row < rows ? few.ids[row] : -1;
  int place = 0, rank = 0, same = 0;  // rows before it, those among them of its expert, all of its expert
  if (row < rows) {
#pragma unroll 4
    for (int other = static_cast<int>(threadIdx.x) % kOfRow; other < rows; other += kOfRow) {
      const int id = few.ids[other];
      const bool is_same = id == expert, is_before = is_same && other < row;
      place += id < expert || is_before ? 1 : 0, rank += is_before ? 1 : 0, same += is_same ? 1 : 0;
    }
  }
  for (int distance = 1; distance < kOfRow; distance *= 2) {
    place += __shfl_xor_sync(kAllLanes, place, distance);
    rank += __shfl_xor_sync(kAllLanes, rank, distance);
    same += __shfl_xor_sync(kAllLanes, same, distance);
  }
  const bool is_first_thread = row < rows && threadIdx.x % kOfRow == 0;
  const bool begins = is_first_thread && rank % kMaxRows == 0;
  const int count = min(kMaxRows, same - rank);
  if (is_first_thread) few.row_token[place] = row / s.chosen, few.grouped_row[row] = place;
  if (begins) {
    atomicOr(few.begins + place / 32, 1u << place % 32);
    if (count > kTokensOfTile) atomicOr(few.wide + place / 32, 1u << place % 32);
  }
  __syncthreads();
  int blocks = 0, wide = 0, blocks_before = 0, wide_before = 0;
  for (int word = 0; word < kFewRows / 32; ++word) {
    const int below = place - word * 32;
    const uint32_t before = below >= 32 ? ~0u : below > 0 ? (1u << below) - 1 : 0;
    blocks += __popc(few.begins[word]), blocks_before += __popc(few.begins[word] & before);
    wide += __popc(few.wide[word]), wide_before += __popc(few.wide[word] & before);
  }
  auto cost = [](uint32_t all, uint32_t of_two) {
    return all * kOneTileCost + of_two * (kTwoTilesCost - kOneTileCost);
  };
  // Where nearly as many multiprocessors can have each one block alone, the others stay idle: who works on
  // two loads rows twice and is last.
  const uint32_t all = gridDim.x, spare = all % static_cast<uint32_t>(blocks),
                 sharing = spare <= all / 16 ? all - spare : all;
  if (begins) {
    few.block[blocks_before] = {tiles[expert].gate_up, tiles[expert].down, expert, place, count};
    const bool is_wide = count > kTokensOfTile;
    const uint32_t begin = cost(blocks_before, wide_before), own = cost(1, is_wide ? 1 : 0);
    for (uint32_t end = 0; end < 2; ++end) {
      const uint32_t within = (blockIdx.x + end) * cost(blocks, wide) / sharing - begin;
      if (within >= own) continue;  // also where it is before this block
      auto share = [&](bool down) {
        const uint32_t tiles = within * tiles_of(s, down);
        return Place{blocks_before, static_cast<int>(is_wide ? tiles / kTwoTilesCost : tiles / kOneTileCost)};
      };
      few.gate_up_share[end] = share(false), few.down_share[end] = share(true);
    }
  }
  if (threadIdx.x == 0) {
    few.blocks = blocks;
    for (uint32_t end = 0; end < 2; ++end) {
      if (blockIdx.x + end < sharing) continue;
      few.gate_up_share[end] = few.down_share[end] = {blocks, 0};
    }
  }
  __syncthreads();
}

}  // namespace nibble::cuda
