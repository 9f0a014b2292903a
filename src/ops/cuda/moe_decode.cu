#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/moe_finish.cuh"
#include "ops/cuda/moe_layer.cuh"
#include "ops/cuda/moe_products.cuh"

namespace nibble::cuda {
namespace {

// The tasks of a run go in rounds, one to each group of warps. The chunks of a row of K, and of all groups,
// are a stage.
template <int kBlock>
__device__ inline void load_run(const Run& run, const RowBlock& block, const Split& k, uint8_t* stages,
                                Ring<kStages>& ring) {
  constexpr int kChunk = chunk_bytes(kBlock);
  const uint64_t policy = evict_first_policy();
  const uint8_t* from = (run.down ? block.down : block.gate_up) + int64_t{run.tile} * k.chunks * kChunk;
  for (int task = 0; task < run.count; task += k.groups) {
    const int tasks = min(k.groups, run.count - task);
    for (int row = 0; row < k.rows; ++row) {
      const int first = row * k.parts, bytes = max(min(k.parts, k.chunks - first), 0) * kChunk;
      ring.wait_empty();
      barrier_expect(ring.full + ring.place, bytes * tasks);
      for (int group = 0; group < tasks && bytes > 0; ++group) {
        bulk_copy(stages + (ring.place * kWarps + group * k.parts) * kChunk,
                  from + (int64_t{task + group} * k.chunks + first) * kChunk, bytes, ring.full + ring.place,
                  policy);
      }
      ring.advance();
    }
  }
}

template <int kBlock, int kBuffers>
__global__ void __launch_bounds__(kThreads, 1) moe_layer(MoeDecodeArgs a, Workspace w) {
  // Else a finisher could take a buffer for full that is not yet, but was not empty either.
  static_assert(kBuffers >= kFinishers);
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = SharedLayout<kBlock, kBuffers>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
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
  __syncthreads();
  dependency_wait();
  dependency_launch();

  const int blocks = *w.blocks;
  Runs runs{w};
  if (warp < kWarps) {
    more_registers<kMultiplyRegisters>();
    for (Run run; runs.next(a.shape, run);) {
      const RowBlock block = w.block[run.block];
      const Split k(a.shape, run.down);
      if (block.count <= kTokensOfTile) {
        multiply_run<kBlock, 1>(a, w, run, block, k, shared, chunks, buffers, sums);
      } else {
        multiply_run<kBlock, 2>(a, w, run, block, k, shared, chunks, buffers, sums);
      }
    }
    combine(a, w, blocks);
  } else {
    fewer_registers<kOtherRegisters>();
    int turn = warp - kLoader - 1;
    for (Run run; runs.next(a.shape, run);) {
      const RowBlock block = w.block[run.block];
      const Split k(a.shape, run.down);
      if (warp != kLoader) {
        finish_run(a, w, run, block, k, buffers, sums, turn);
      } else if (lane == 0) {
        load_run<kBlock>(run, block, k, shared, chunks);
      }
    }
  }
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

template <int kBlock, int kBuffers>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kBytes = SharedLayout<kBlock, kBuffers>::kBytes;
  const auto kernel = moe_layer<kBlock, kBuffers>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  launch_early(kernel, device.multiprocessors, kThreads, kBytes, stream, args,
               workspace_at(static_cast<char*>(args.workspace), args.shape, args.tokens));
  return cudaGetLastError();
}

// Buffers of sums: where there is room, and where there is not.
constexpr int kBuffers = 8, kFewBuffers = 3;

template <int kBlock>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  if (device.shared_bytes >= SharedLayout<kBlock, kBuffers>::kBytes)
    return launch_layer<kBlock, kBuffers>(args, device, stream);
  return launch_layer<kBlock, kFewBuffers>(args, device, stream);
}

}  // namespace

int64_t moe_decode_shared_bytes(int block) {
  return block == 16 ? SharedLayout<16, kFewBuffers>::kBytes : SharedLayout<32, kFewBuffers>::kBytes;
}

cudaError_t moe_decode(const MoeDecodeArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  Device device;
  cudaError_t error = current_device(device);
  if (error == cudaSuccess) error = group_rows(args, device.multiprocessors, stream);
  if (error != cudaSuccess) return error;
  return args.shape.block == 16 ? launch_layer<16>(args, device, stream)
                                : launch_layer<32>(args, device, stream);
}

}  // namespace nibble::cuda
