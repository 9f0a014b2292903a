#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/moe_activate.cuh"
#include "ops/cuda/moe_finish.cuh"
#include "ops/cuda/moe_layer.cuh"
#include "ops/cuda/moe_many.h"
#include "ops/cuda/moe_products.cuh"

namespace nibble::cuda {
namespace {

// By a warp. The tasks of a run go in rounds, one to each group of warps, and to the lane that copies its
// weights. The chunks of a row of K, and of all groups, are a stage.
template <TileKind kKind, int kStages>
__device__ inline void load_run(const Run& run, const RowBlock& block, const Split& k, uint8_t* stages,
                                Ring<kStages>& ring) {
  constexpr int kChunk = chunk_bytes(kKind);
  const int group = static_cast<int>(threadIdx.x) % 32;
  const uint64_t policy = evict_first_policy();
  const uint8_t* from =
      (run.down ? block.down : block.gate_up) + int64_t{run.tile + group} * k.chunks * kChunk;
  for (int task = 0; task < run.count; task += k.groups, from += k.groups * k.chunks * kChunk) {
    const int tasks = min(k.groups, run.count - task);
    for (int row = 0; row < k.rows; ++row) {
      const int first = row * k.parts, bytes = max(min(k.parts, k.chunks - first), 0) * kChunk;
      ring.wait_empty();
      if (group == 0) barrier_expect(ring.full + ring.place, bytes * tasks);
      __syncwarp();
      if (group < tasks && bytes > 0) {
        bulk_copy(stages + (ring.place * kWarps + group * k.parts) * kChunk, from + first * kChunk, bytes,
                  ring.full + ring.place, policy);
      }
      ring.advance();
    }
  }
}

// What moe_layer does before its products.
struct Before {
  bool group = false, route = false;  // route only with group
  bool splits = false;                // where it groups: rows of x fit in shared memory
  RouteArgs routing;
};

// Routes and groups few rows. Afterwards all threads see what is in `few`; of rows that are routed here the
// weights are scores yet. (Unused where moe_layer is empty.)
[[maybe_unused]] __device__ inline void prepare_few(const MoeDecodeArgs& a, const Before& before,
                                                    const FewScratch& scratch, FewRows& few,
                                                    __nv_bfloat16* few_x) {
  const int thread = static_cast<int>(threadIdx.x), chosen = a.shape.chosen;
  if (before.route) {
    choose_few(before.routing, scratch, few);
  } else if (thread < a.tokens * chosen) {
    few.ids[thread] = a.ids[thread / chosen * a.ids_stride + thread % chosen];
    few.weights[thread] = a.weights[thread / chosen * a.weights_stride + thread % chosen];
  }
  const int first = before.route ? a.tokens * 32 : 0;  // of the threads that do not choose
  if (few_x != nullptr && thread >= first) {
    const int d = a.shape.model_chunks() * kChunkColumns;
#pragma unroll 1
    for (int t = 0; t < a.tokens; ++t, few_x += 2 * d) {
#pragma unroll 4
      for (int c = (thread - first) * 4; c < d; c += (kThreads - first) * 4) {
        const float4 x =
            c < a.shape.model ? *reinterpret_cast<const float4*>(a.x + t * a.x_stride + c) : float4{};
        uint2 high, low;
        split(x.x, x.y, high.x, low.x);
        split(x.z, x.w, high.y, low.y);
        __nv_bfloat16* const to = few_x + operand_place(a.shape.kind, c);
        *reinterpret_cast<uint2*>(to) = high, *reinterpret_cast<uint2*>(to + d) = low;
      }
    }
  }
  __syncthreads();
  group_few(a.shape, a.tokens, scratch.tiles, few);
}

// By a warp, of row t. The first block writes ids and weights for who wants to see them.
[[maybe_unused]] __device__ inline void weigh_few(const RouteArgs& routing, int t, FewRows& few) {
  const int chosen = static_cast<int>(routing.ids.cols), lane = static_cast<int>(threadIdx.x) % 32;
  float* const weights = few.weights + t * chosen;
  weigh_chosen(routing.spec, chosen, weights, [&](int rank, float weight) {
    weights[rank] = weight;
    if (blockIdx.x == 0) routing.weights.data[t * routing.weights.stride + rank] = weight;
  });
  for (int rank = lane; rank < chosen && blockIdx.x == 0; rank += 32)
    routing.ids.data[t * routing.ids.stride + rank] = few.ids[t * chosen + rank];
}

template <TileKind kKind, bool kRoomy>
__global__ void __launch_bounds__(kThreads, 1) moe_layer(MoeDecodeArgs a, Workspace w, Before before) {
#ifdef NIBBLE_HOPPER_OR_LATER
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = SharedLayout<kKind, kRoomy>;
  constexpr int kStages = Layout::kStages, kBuffers = Layout::kBuffers;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + Layout::kBarriers);
  Ring<kStages> chunks{barriers, barriers + kStages};
  Ring<kBuffers> sums{barriers + 2 * kStages, barriers + 2 * kStages + kBuffers};
  float4* const buffers = reinterpret_cast<float4*>(shared + Layout::kSums);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(chunks.full + i, 1), barrier_init(chunks.empty + i, kWarps * kWarpArrivals);
    for (int i = 0; i < kBuffers; ++i)
      barrier_init(sums.full + i, kWarps * kWarpArrivals), barrier_init(sums.empty + i, kWarpArrivals);
    barrier_init_fence();
  }
  FewRows& few = *reinterpret_cast<FewRows*>(shared + Layout::kFewRows);
  __nv_bfloat16* const few_x =
      Layout::kGroups && before.splits ? reinterpret_cast<__nv_bfloat16*>(shared + Layout::kFewX) : nullptr;
  const Groups groups{w, a, few, Layout::kGroups && before.group, few_x};
  const Handed handed = handed_at(a.handed, a.shape, a.tokens);
  if (groups.are_few) {
    const FewScratch scratch(shared + Layout::kSums, a);
    for (int e = static_cast<int>(threadIdx.x); e < a.shape.experts; e += kThreads) {
      scratch.tiles[e] = {a.experts[e].gate_up, a.experts[e].down};
      scratch.bias[e] = before.routing.bias_E != nullptr ? before.routing.bias_E[e] : 0.0f;
    }
    if (threadIdx.x < kFewRows / 32) few.begins[threadIdx.x] = few.wide[threadIdx.x] = 0;
    dependency_wait();
    dependency_launch();
    prepare_few(a, before, scratch, few, few_x);
  } else {
    SharedProducts shared_expert(a);
    __syncthreads();
    dependency_wait();
    dependency_launch();
    if constexpr (kRoomy) shared_expert.run(handed, reinterpret_cast<float*>(buffers));
  }

  Runs runs{groups};
  if (warp < kWarps) {
    more_registers<kMultiplyRegisters>();
    for (Run run; runs.next(a.shape, run);) {
      const RowBlock block = groups.block(run.block);
      const Split k(a.shape, run.down);
      if (block.count <= kTokensOfTile) {
        multiply_run<kKind, 1>(a, w, handed, groups, run, block, k, shared, chunks, buffers, sums);
      } else {
        multiply_run<kKind, 2>(a, w, handed, groups, run, block, k, shared, chunks, buffers, sums);
      }
    }
    arrive(kDoneBarrier, kDoneThreads);
    meet(kWeightsBarrier, kWeightsThreads);
    combine(a, handed, groups);
  } else {
    fewer_registers<kOtherRegisters>();
    if (warp == kLoader) {
      for (Run run; runs.next(a.shape, run);)
        load_run<kKind>(run, groups.block(run.block), Split(a.shape, run.down), shared, chunks);
      clear_h(a, handed);
      return;
    }
    const int finisher = warp - kLoader - 1;
    for (int t = finisher; t < a.tokens && groups.are_few && before.route; t += kFinishers)
      weigh_few(before.routing, t, few);
    arrive(kWeightsBarrier, kWeightsThreads);
    if (finisher == 0 && a.shared.tiles == nullptr) {  // with tiles the kernel before did it
      const int lane = static_cast<int>(threadIdx.x) % 32;
      activate_shared(a, static_cast<int>(blockIdx.x) * 32 + lane, static_cast<int>(gridDim.x) * 32);
    }
    int turn = finisher;
    for (Run run; runs.next(a.shape, run);) {
      const Finish finish(a, handed, run, groups.block(run.block), unscale(kKind));
      const Split k(a.shape, run.down);
      if (run.down) {
        finish_run<kKind, true>(a, finish, run, k, buffers, sums, turn);
      } else {
        finish_run<kKind, false>(a, finish, run, k, buffers, sums, turn);
      }
    }
  }
#endif
}

struct Device {
  int multiprocessors = 0, shared_bytes = 0;
};

cudaError_t current_device(Device& device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  device.multiprocessors = std::min(device.multiprocessors, kMaxMultiprocessors);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  return error;
}

// Whether moe_layer groups the rows, and routes them if they are to be. A shared expert's product is begun
// while another kernel does.
bool groups_itself(const MoeDecodeArgs& a, int scratch_bytes) {
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && a.x_stride % 4 == 0 && a.shape.model % 4 == 0;
  return a.shared.tiles == nullptr && a.tokens <= kFewTokens && a.tokens * a.shape.chosen <= kFewRows &&
         is_aligned && few_rows_scratch(a) <= scratch_bytes &&
         (a.route == nullptr || a.route->spec.topk_group >= a.route->spec.n_group);
}

// A block a multiprocessor, which wait for each other: never two such launches at once on a device.
template <TileKind kKind, bool kRoomy>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  using Layout = SharedLayout<kKind, kRoomy>;
  static_assert(!kRoomy || SharedProducts::kSharedBytes <= Layout::kSumsBytes + Layout::kFewXBytes);
  if (!kRoomy && args.shared.tiles != nullptr) return cudaErrorInvalidValue;
  const auto kernel = moe_layer<kKind, kRoomy>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  Before before;
  before.splits = args.tokens * args.shape.model_chunks() * kChunkColumns * 4 <= Layout::kFewXBytes &&
                  few_rows_scratch(args) <= Layout::kSumsBytes;
  // Rows of x come to be while others still use the scratch.
  before.group =
      Layout::kGroups && groups_itself(args, Layout::kSumsBytes + (before.splits ? 0 : Layout::kFewXBytes));
  before.route = before.group && args.route != nullptr;
  if (before.route) before.routing = *args.route;
  if (error == cudaSuccess && !before.group) error = group_rows(args, false, device.multiprocessors, stream);
  if (error != cudaSuccess) return error;
  launch_early(kernel, device.multiprocessors, kThreads, Layout::kBytes, stream, args,
               workspace_at(static_cast<char*>(args.workspace), args.shape, args.tokens, false), before);
  return cudaGetLastError();
}

template <TileKind kKind>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  if (moe_decode_is_roomy(kKind, device.shared_bytes)) return launch_layer<kKind, true>(args, device, stream);
  return launch_layer<kKind, false>(args, device, stream);
}

// visit<TileKind>(), for those of 4 bits.
template <class Visit>
auto with_4bit_kind(TileKind kind, Visit visit) {
  if (kind == TileKind::kNvfp4) return visit.template operator()<TileKind::kNvfp4>();
  if (kind == TileKind::kMxfp4) return visit.template operator()<TileKind::kMxfp4>();
  return visit.template operator()<TileKind::kQ4>();
}

}  // namespace

int64_t moe_decode_shared_bytes(TileKind kind) {
  return with_4bit_kind(kind, [&]<TileKind kKind>() { return SharedLayout<kKind, false>::kBytes; });
}

int64_t moe_decode_roomy_bytes(TileKind kind) {
  return with_4bit_kind(kind, [&]<TileKind kKind>() { return SharedLayout<kKind, true>::kBytes; });
}

bool moe_decode_is_roomy(TileKind kind, int64_t shared_bytes) {
  return shared_bytes >= moe_decode_roomy_bytes(kind);
}

// Few rows gain more where they are routed in the same launch, and many where the product is one of its own.
bool can_join_experts(TileKind down, int64_t tokens) {
  constexpr int64_t kFewest = 5;
  return down == TileKind::kBF16 && tokens >= kFewest && tokens <= kMostJoined;
}

cudaError_t moe_decode(const MoeDecodeArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  if (uses_many(args.shape, args.tokens)) {
    if (args.shared.width != 0) return cudaErrorInvalidValue;  // joins few rows alone
    error = group_rows(args, true, device.multiprocessors, stream);
    return error == cudaSuccess ? moe_many(args, device.multiprocessors, stream) : error;
  }
  if (args.shape.kind == TileKind::kBF16) return cudaErrorInvalidValue;
  return with_4bit_kind(args.shape.kind,
                        [&]<TileKind kKind>() { return launch_layer<kKind>(args, device, stream); });
}

}  // namespace nibble::cuda
