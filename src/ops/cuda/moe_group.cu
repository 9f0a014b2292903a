#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/moe_activate.cuh"
#include "ops/cuda/moe_workspace.h"
#include "ops/cuda/primitives.cuh"
#include "ops/cuda/route_row.cuh"
#include "ops/cuda/tile_decode.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 1024;
static_assert(kThreads == kRouteThreads && kThreads == kMaxExperts);

// The two parts of x, by the blocks from `first` on.
__device__ void split_x(const MoeDecodeArgs& a, const Workspace& w, int first) {
  const MoeShape& s = a.shape;
  const int d = (s.model + 127) / 128 * 128;
  const int64_t count = static_cast<int64_t>(a.tokens) * d;
  const int64_t step = static_cast<int64_t>(gridDim.x - first) * kThreads;
  for (int64_t id = (blockIdx.x - first) * static_cast<int64_t>(kThreads) + threadIdx.x; id < count;
       id += step) {
    const int64_t t = id / d;
    const int c = static_cast<int>(id % d);
    __nv_bfloat16* to = w.x + t * 2 * d + operand_place(s.kind, c);
    split(c < s.model ? a.x[t * a.x_stride + c] : 0.0f, to[0], to[d]);
  }
}

// The shared expert's activation by the blocks from `first` on, if its product comes with the experts.
__device__ void activate_own_share(const MoeDecodeArgs& a, int first) {
  if (a.shared.tiles == nullptr) return;
  activate_shared(a, static_cast<int>(blockIdx.x - first) * kThreads + static_cast<int>(threadIdx.x),
                  static_cast<int>(gridDim.x - first) * kThreads);
}

// Where the weights of the expert of this thread's number are. It does not wait for the kernel before.
struct OwnExpert {
  const uint8_t *gate_up = nullptr, *down = nullptr;
  __device__ explicit OwnExpert(const MoeDecodeArgs& a) {
    const int e = static_cast<int>(threadIdx.x);
    if (e < a.shape.experts) gate_up = a.experts[e].gate_up, down = a.experts[e].down;
  }
};

// The expert of each (token, choice): in args.ids, or on its way from the blocks that route (struct Handed).
struct ChosenIds {
  const MoeDecodeArgs& a;
  uint32_t* handed;  // null: there already

  __device__ int operator()(int row) const {
    if (handed == nullptr) return a.ids[row / a.shape.chosen * a.ids_stride + row % a.shape.chosen];
    uint32_t word = 0;
    while (word == 0) word = load_relaxed(handed + row);
    return static_cast<int>(~word);
  }
  // Nobody asks for it again.
  __device__ void forget(int row) const {
    if (handed != nullptr) handed[row] = 0;
  }
};

// Rows in the stable order of (expert, token), cut into row blocks, and shares of them.
__device__ void group(const MoeDecodeArgs& a, const Workspace& w, bool many, int multiprocessors,
                      const OwnExpert& expert_of_me, const ChosenIds& id) {
  const int most = many ? kManyRows : kMaxRows;  // rows of a block
  const MoeShape& s = a.shape;
  const int rows = a.tokens * s.chosen, me = static_cast<int>(threadIdx.x), warp = me / 32, lane = me % 32;

  // How many rows each expert has (thread by expert), and where its rows and its blocks begin.
  __shared__ int next_row[kMaxExperts];  // first the count, then the place of the expert's next row
  __shared__ int3 warp_sum[32];
  next_row[me] = 0;
  __syncthreads();
  const int first_id = me < rows ? id(me) : -1;
  for (int row = me; row < rows; row += 1024) atomicAdd(&next_row[row == me ? first_id : id(row)], 1);
  __syncthreads();
  const int count = next_row[me], blocks = (count + most - 1) / most;
  // What the passes over the expert's weights take: the last one's rows may fit one tile.
  const int rest = count - (blocks - 1) * most;
  const int cost =
      count == 0 ? 0 : (blocks - 1) * kTwoTilesCost + (rest > kTokensOfTile ? kTwoTilesCost : kOneTileCost);
  int3 sum = {count, blocks, cost};
  auto add_below = [&] {  // inclusive sums over the lanes
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
      const int z = __shfl_up_sync(~0u, sum.z, step);
      if (lane >= step) sum.x += x, sum.y += y, sum.z += z;
    }
  };
  add_below();
  if (lane == 31) warp_sum[warp] = sum;
  __syncthreads();
  const int3 own = sum;
  sum = warp_sum[lane];
  add_below();
  const int other = (warp + 31) % 32;  // the sums up to the warp before
  const int3 before = {__shfl_sync(~0u, sum.x, other), __shfl_sync(~0u, sum.y, other),
                       __shfl_sync(~0u, sum.z, other)};
  const int64_t all = __shfl_sync(~0u, sum.z, 31);
  const int first_row = own.x - count + (warp > 0 ? before.x : 0);
  const int first_block = own.y - blocks + (warp > 0 ? before.y : 0);
  __shared__ int2 begin_of[kMaxExperts];  // cost and blocks before an expert
  begin_of[me] = {own.z - cost + (warp > 0 ? before.z : 0), first_block};
  __syncthreads();
  // Where the shares of the multiprocessors begin.
  for (int i = me; i < multiprocessors && !many; i += 1024) {
    const int target = static_cast<int>(i * all / multiprocessors);
    int expert = 0;  // the last that begins at or before it
    for (int step = kMaxExperts / 2; step > 0; step /= 2) {
      if (begin_of[expert + step].x <= target) expert += step;
    }
    const int within = target - begin_of[expert].x, passes = (next_row[expert] + kMaxRows - 1) / kMaxRows;
    const int pass = min(within / kTwoTilesCost, passes - 1), offset = within - pass * kTwoTilesCost;
    const int pass_cost = next_row[expert] - pass * kMaxRows > kTokensOfTile ? kTwoTilesCost : kOneTileCost;
    auto begin = [&](int tiles) { return Place{begin_of[expert].y + pass, offset * tiles / pass_cost}; };
    w.gate_up_share[i] = begin(tiles_of(s, false)), w.down_share[i] = begin(tiles_of(s, true));
  }
  if (me == 1023 && !many)
    w.gate_up_share[multiprocessors] = w.down_share[multiprocessors] = {first_block + blocks, 0};
  __syncthreads();
  for (int b = 0; b < blocks; ++b) {
    w.block[first_block + b] = {expert_of_me.gate_up, expert_of_me.down, me, first_row + b * most,
                                min(most, count - b * most)};
  }
  if (me == 1023) *w.blocks = first_block + blocks;
  next_row[me] = first_row;

  // Rows of an expert in their order: 1024 at a time, a row's place by how many before it chose the same.
  __shared__ __align__(16) uint8_t seen[32][kMaxExperts];  // rows of a warp that chose the expert
  for (int begin = 0; begin < rows; begin += 1024) {
    for (int i = me; i < 32 * kMaxExperts / 16; i += 1024) reinterpret_cast<uint4*>(seen)[i] = {0, 0, 0, 0};
    const int row = begin + me, expert = begin == 0 ? first_id : row < rows ? id(row) : -1;
    if (expert >= 0) id.forget(row);
    const uint32_t same = __match_any_sync(~0u, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    __syncthreads();
    if (expert >= 0 && rank == 0) seen[warp][expert] = static_cast<uint8_t>(__popc(same));
    __syncthreads();
    if (expert >= 0) {
      int place = next_row[expert] + rank;
      for (int other = 0; other < warp; ++other) place += seen[other][expert];
      w.row_token[place] = row / s.chosen;
      w.grouped_row[row] = place;
    }
    __syncthreads();
    int total = 0;
    for (int other = 0; other < 32; ++other) total += seen[other][me];
    next_row[me] += total;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) group_kernel(MoeDecodeArgs a, bool many, int multiprocessors) {
  const OwnExpert expert(a);
  dependency_wait();
  dependency_launch();
  const Workspace w = workspace_at(static_cast<char*>(a.workspace), a.shape, a.tokens, many);
  if (blockIdx.x > 0) {
    split_x(a, w, 1);
    return activate_own_share(a, 1);
  }
  group(a, w, many, multiprocessors, expert, {a, nullptr});
}

// A block routes a row, and one behind them groups what they choose.
__global__ void __launch_bounds__(kThreads)
    route_and_group_kernel(RouteArgs route, MoeDecodeArgs a, bool many, int multiprocessors) {
  extern __shared__ __align__(16) uint32_t s_keys[];
  __shared__ float s_warps[kThreads / kWarp];
  const int block = static_cast<int>(blockIdx.x);
  const OwnExpert expert(a);
  const float bias = own_bias(route);
  dependency_wait();
  dependency_launch();
  const Workspace w = workspace_at(static_cast<char*>(a.workspace), a.shape, a.tokens, many);
  if (block > a.tokens) {
    split_x(a, w, a.tokens + 1);
    return activate_own_share(a, a.tokens + 1);
  }
  uint32_t* const ids = handed_at(a.handed, a.shape, a.tokens).ids;
  if (block == a.tokens) return group(a, w, many, multiprocessors, expert, {a, ids});
  route_row(route, block, bias, s_keys, s_warps, [&](int rank, int e) {
    store_relaxed(ids + block * a.shape.chosen + rank, ~static_cast<uint32_t>(e));
  });
}

}  // namespace

int64_t moe_decode_workspace_bytes(const MoeShape& shape, int tokens) {
  return workspace_at(nullptr, shape, tokens, uses_many(shape, tokens)).bytes;
}

int64_t moe_decode_handed(const MoeShape& shape, int tokens) {
  // Steps with more tokens hand on the ids alone.
  return handed_at(nullptr, shape, std::min(tokens, shape.most_few)).words +
         static_cast<int64_t>(tokens) * shape.chosen;
}

cudaError_t group_rows(const MoeDecodeArgs& args, bool many, int multiprocessors, cudaStream_t stream) {
  const int64_t elements = static_cast<int64_t>(args.tokens) * args.shape.model_chunks() * 128;
  const auto splitting =
      many ? 0 : static_cast<int>(std::min<int64_t>((elements + kThreads - 1) / kThreads, multiprocessors));
  if (args.route == nullptr) {
    launch_early(group_kernel, 1 + splitting, kThreads, 0, stream, args, many, multiprocessors);
    return cudaGetLastError();
  }
  const int bytes = route_shared_bytes(*args.route);
  const cudaError_t error =
      cudaFuncSetAttribute(route_and_group_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  launch_early(route_and_group_kernel, args.tokens + 1 + splitting, kThreads, static_cast<size_t>(bytes),
               stream, *args.route, args, many, multiprocessors);
  return cudaGetLastError();
}

}  // namespace nibble::cuda
