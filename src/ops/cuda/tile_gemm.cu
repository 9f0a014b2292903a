// Products of many rows: y = W x, W [n, k] in tiles, x [rows, k] as two bfloat16 parts, on wgmma.
//
// A task is 128 weight rows and kTokens rows of x. Of a block's three warpgroups one feeds a ring of stages
// in shared memory (a chunk of those weight rows, and the same columns of x), and two multiply, 64 weight
// rows each. Weights of BF16 go from shared memory as they are; others are decoded into registers.
// kSplit = 1: a block goes over all of K. kSplit = 4: a cluster of four shares a task, each one group of
// ranges; every block sends the others their share of the rows of x and finishes its own. Which of them, and
// how many rows are in a task, is a matter of speed alone: every sum has the order of linear_tiles.cuh.
#include <algorithm>

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear_tiles.cuh"
#include "ops/cuda/tile_gemm.h"
#include "ops/cuda/tile_gemm_rows.cuh"
#include "ops/cuda/wgmma.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarpgroups = 2, kWarps = 4 * kWarpgroups;  // that multiply
constexpr int kThreads = kWarps * 32 + 128;
constexpr int kTaskPairs = 2 * kWarpgroups;  // of tiles
constexpr int kGemmRows = kTaskPairs * kTaskRows;

constexpr int kMaxStages = 12;

// Rows of x lie in units (tile_gemm_rows.cuh).
template <TileKind kKind, int kTokens, int kSplit>
struct Layout {
  static constexpr int kUnitBytes = kTokens * 256, kPartBytes = kUnitBytes / 2;
  static constexpr int kStepBytes = kTokens * 32;
  static constexpr int kWeightBytes = kTaskPairs * Tiles<kKind>::kBytes;
  static constexpr int kRowBytes = Tiles<kKind>::kParts * kUnitBytes;
  static constexpr int kValues = kTokens / 2;  // of a thread
  // Values go to the other blocks of a cluster in rounds, so that they do not need much room: [2
  // buffers][block that sent][value][thread].
  static constexpr int kRoundValues = std::min(kValues, 32), kRounds = kValues / kRoundValues;
  static constexpr int kBufferBytes = kSplit == 1 ? 0 : kRoundValues * kWarps * 32 * 4;
  static constexpr int kExchangeBytes = 2 * kBufferBytes;
  static constexpr int kBarrierBytes = ((2 * kMaxStages + 2 * kWarps) * 8 + 127) / 128 * 128;
  static constexpr int kRingBytes = kMaxSharedBytes - kExchangeBytes - kBarrierBytes;
};

// Shared memory: barriers, exchange, the ring's weights [stages], rows of x. Where all of x that a
// block needs fits beside four stages of weights, it stays there; else they have a place for each stage.
struct Ring {
  int stages;
  bool keeps_rows;
};
template <class L>
Ring ring_of(int row_blocks, int chunks) {
  const int64_t left = L::kRingBytes - int64_t{chunks} * L::kRowBytes;
  if (row_blocks == 1 && left >= 4 * L::kWeightBytes) {
    return {std::min<int>(kMaxStages, static_cast<int>(left) / L::kWeightBytes), true};
  }
  return {std::min(kMaxStages, L::kRingBytes / (L::kWeightBytes + L::kRowBytes)), false};
}

template <TileKind kKind, int kTokens, int kSplit>
__global__ void __launch_bounds__(kThreads, 1)
    tile_gemm_kernel(const __grid_constant__ TileLinear p, int tasks, int row_blocks, int units, Ring ring) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = Tiles<kKind>;
  using L = Layout<kKind, kTokens, kSplit>;
  extern __shared__ __align__(128) uint8_t shared[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + kMaxStages;
  uint64_t* const sent = empty + kMaxStages;  // of each buffer and warp: what all blocks send to it is there
  float* const exchange = reinterpret_cast<float*>(shared + L::kBarrierBytes);
  uint8_t* const weights_ring = shared + L::kBarrierBytes + L::kExchangeBytes;
  uint8_t* const rows_ring = weights_ring + ring.stages * L::kWeightBytes;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < ring.stages; ++i) {
      barrier_init(full + i, kTaskPairs);
      barrier_init(empty + i, kWarps * kWarpArrivals);
    }
    for (int i = 0; i < 2 * kWarps; ++i) barrier_init(sent + i);
    barrier_init_fence();
  }
  if constexpr (kSplit > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  dependency_launch();

  const int rank = static_cast<int>(blockIdx.x) % kSplit;
  const int first_task = static_cast<int>(blockIdx.x) / kSplit;
  const int task_step = static_cast<int>(gridDim.x) / kSplit;
  const int all = (static_cast<int>(p.k) + T::kColumns - 1) / T::kColumns;
  constexpr int kOwnRanges = kRanges / kSplit;
  const int begin = range_begin(rank * kOwnRanges, all), end = range_begin((rank + 1) * kOwnRanges, all);

  if (warp >= kWarps) {
    fewer_registers<40>();
    // A thread a pair of tiles, for one takes as long to start its copies as the memory to do them; the first
    // copies the rows of x, too.
    const int pair = warp - kWarps;
    if (lane == 0 && begin < end) {
      const uint64_t weights_policy = evict_first_policy(), rows_policy = normal_policy();
      struct Place {
        int task, chunk;
        const uint8_t* chunks;  // of this pair of tiles; null: it has none
      };
      auto enter = [&](Place& at) {
        if (at.task >= tasks) return;
        const TilePlace place = tile_place(p, at.task / row_blocks, kGemmRows);
        const int64_t n = static_cast<int64_t>(place.tile) * kGemmRows + pair * kTaskRows;
        at.chunks = n < place.product.n ? place.product.tiles + n / kTaskRows * all * T::kBytes : nullptr;
      };
      auto next = [&](Place& at) {
        if (++at.chunk < end) return;
        at.chunk = begin;
        at.task += task_step;
        enter(at);
      };
      auto copies_rows = [&](const Place& at) {
        return pair == 0 && (!ring.keeps_rows || at.task == first_task);
      };
      auto copy_weights = [&](const Place& at, int stage) {
        barrier_expect(full + stage,
                       (at.chunks != nullptr ? T::kBytes : 0) + (copies_rows(at) ? L::kRowBytes : 0));
        if (at.chunks == nullptr) return;
        bulk_copy(weights_ring + stage * L::kWeightBytes + pair * T::kBytes,
                  at.chunks + static_cast<int64_t>(at.chunk) * T::kBytes, T::kBytes, full + stage,
                  weights_policy);
      };
      auto copy_rows = [&](const Place& at, int stage) {
        if (!copies_rows(at)) return;
        const int slot = ring.keeps_rows ? at.chunk - begin : stage;
        const int64_t unit = static_cast<int64_t>(at.task % row_blocks) * units + at.chunk * T::kParts;
        bulk_copy(rows_ring + slot * L::kRowBytes,
                  static_cast<const uint8_t*>(p.workspace) + unit * L::kUnitBytes, L::kRowBytes, full + stage,
                  rows_policy);
      };
      Place at{first_task, begin, nullptr};
      enter(at);
      Place rows_at = at;
      int filled = 0;
      for (; filled < ring.stages && at.task < tasks; ++filled) {
        copy_weights(at, filled);  // weights do not wait for the kernel before
        next(at);
      }
      dependency_wait();
      for (int stage = 0; stage < filled; ++stage) {
        copy_rows(rows_at, stage);
        next(rows_at);
      }
      uint32_t parity = 0;
      for (int stage = 0; at.task < tasks; next(at)) {
        barrier_wait(empty + stage, parity);
        copy_weights(at, stage);
        copy_rows(at, stage);
        if (++stage == ring.stages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    more_registers<232>();
    dependency_wait();
    const int warpgroup = warp / 4, pair = warp / 2, g = lane / 4, q = lane % 4;
    const uint64_t weights0 = operand(weights_ring + warpgroup * 2 * T::kBytes, 128, kBF16HalfBytes);
    const uint64_t rows0 = operand(rows_ring, kTokens * 16, 128);
    int stage = 0;
    uint32_t parity = 0;
    auto release = [&](int of_stage) { warp_arrive(empty + of_stage); };
    // Value i of a thread: row 8 (i / 2 % 2) + g of the warp's tile, rows of x 8 (i / 4) + 2 q + i % 2.
    // visit(value, product, row, n) for `kCount` of a task's values, those that are there.
    auto for_outputs = [&]<int kCount>(int task, int first_value, auto visit) {
      const TilePlace place = tile_place(p, task / row_blocks, kGemmRows);
      const int64_t n0 = static_cast<int64_t>(place.tile) * kGemmRows + warp * kTileRows + g;
      const int row0 = task % row_blocks * kTokens + 2 * q;
#pragma unroll
      for (int value = 0; value < kCount; ++value) {
        const int i = first_value + value;
        const int64_t n = n0 + i / 2 % 2 * 8;
        const int row = row0 + i / 4 * 8 + i % 2;
        if (n < place.product.n && row < p.rows) visit(value, place.product, row, n);
      }
    };
    auto standing = [](const TileProduct& product, int64_t row, int64_t n) {
      return product.adds ? product.out[row * product.out_stride + n] : 0.0f;
    };
    // Between the blocks of a cluster; round: counted over all tasks. What the round before brought is
    // received before this one's is sent, so that who has received a block's round knows that it is done with
    // the buffer of the one before; and it was sent a task ago, so that nobody waits.
    constexpr int kShare = L::kRoundValues / kSplit;
    auto receive = [&](int round) {
      const int buffer = round % 2;
      const int task = first_task + round / L::kRounds * task_step;
      const int first_value = round % L::kRounds * L::kRoundValues + rank * kShare;
      float before[kShare];  // asked for while others still send
      for_outputs.template operator()<kShare>(
          task, first_value, [&](int value, const TileProduct& product, int64_t row, int64_t n) {
            before[value] = standing(product, row, n);
          });
      cluster_wait(sent + buffer * kWarps + warp, round / 2 % 2);
      const float* const from = exchange + buffer * (L::kBufferBytes / 4) + threadIdx.x;
      float sums[kShare] = {};
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
#pragma unroll
        for (int group = 0; group < kSplit; ++group) sums[i] += from[(group * kShare + i) * kWarps * 32];
      }
      for_outputs.template operator()<kShare>(
          task, first_value, [&](int value, const TileProduct& product, int64_t row, int64_t n) {
            finish<kKind>(sums[value], product, row, n, before[value]);
          });
    };
    auto send = [&](int round, const float* values) {
      const int buffer = round % 2;
      uint64_t* const barrier = sent + buffer * kWarps + warp;
      if (lane == 0) barrier_expect(barrier, kSplit * kShare * 32 * sizeof(float));
      const uint32_t place =
          buffer * L::kBufferBytes + (rank * kShare * kWarps * 32 + threadIdx.x) * sizeof(float);
#pragma unroll
      for (int to = 0; to < kSplit; ++to) {
        const uint32_t address = cluster_address(exchange, to) + place;
        const uint32_t barrier_there = cluster_address(barrier, to);
#pragma unroll
        for (int i = 0; i < kShare; ++i)
          cluster_store(address + i * kWarps * 32 * sizeof(float), values[to * kShare + i], barrier_there);
      }
    };

    float products[L::kValues] = {};
    float of_block[2][T::kScalesSums ? L::kValues : 1] = {};
    int rounds = 0;
    for (int task = first_task; task < tasks; task += task_step) {
      float of_group[L::kValues] = {}, sums[L::kValues] = {};
      int chunk = begin;
      for (int range = 0; range < kOwnRanges; ++range) {
        const int stop = range_begin(rank * kOwnRanges + range + 1, all);
        if (chunk < stop) {
          uint32_t add = 0;
          int previous = 0;
          if constexpr (T::kScalesSums) {
#pragma unroll
            for (float& sum : products) sum = 0;
          }
          // Operands in registers stay while they are multiplied; the next come to others meanwhile.
          uint32_t a[2][4][4];
          auto multiply = [&](int buffer) {
            barrier_wait(full + stage, parity);
            const int slot = ring.keeps_rows ? chunk - begin : stage;
            const uint64_t rows = operand_at(rows0, slot * L::kRowBytes);
            if constexpr (kKind == TileKind::kBF16) {
              const uint64_t weights = operand_at(weights0, stage * L::kWeightBytes);
              wgmma_begin();
#pragma unroll
              for (int step = 0; step < 4; ++step) {
                const uint64_t a = operand_at(weights, step * kBF16StepBytes);
                const uint64_t b = operand_at(rows, step * L::kStepBytes);
                wgmma(products, a, b, step == 0 ? add : 1);
                wgmma(products, a, operand_at(b, L::kPartBytes), 1);
              }
              wgmma_commit();
              wgmma_wait<1>();
            } else if constexpr (T::kScalesSums) {
              // A block's products are added up while the next ones run.
              const uint8_t* const chunk_at = weights_ring + stage * L::kWeightBytes + pair * T::kBytes;
              const BlockScales scales = load_block_scales(chunk_at, warp % 2, lane);
              auto add_up = [&](int block) {
                wgmma_settled(of_block[block % 2]);
                add_block<L::kValues>(scales, block, of_block[block % 2], products);
              };
#pragma unroll
              for (int block = 0; block < 4; ++block) {
                const int part = block / 2;
                if (block % 2 == 0) load_tile<kKind>(chunk_at, warp % 2, lane, part, a[part]);
                wgmma_begin();
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  const int step = block % 2 * 2 + i;
                  const uint64_t b = operand_at(rows, part * L::kUnitBytes + step * L::kStepBytes);
                  const auto& w = a[part][step];
                  wgmma(of_block[block % 2], w[0], w[1], w[2], w[3], b, i == 0 ? 0 : 1);
                  wgmma(of_block[block % 2], w[0], w[1], w[2], w[3], operand_at(b, L::kPartBytes), 1);
                }
                wgmma_commit();
                if (block == 0) continue;
                wgmma_wait<1>();
                add_up(block - 1);
              }
              wgmma_wait<0>();
              add_up(3);
            } else {
#pragma unroll
              for (int part = 0; part < T::kParts; ++part, ++buffer) {
                load_tile<kKind>(weights_ring + stage * L::kWeightBytes + pair * T::kBytes, warp % 2, lane,
                                 part, a[buffer]);
                wgmma_begin();
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                  const uint64_t b = operand_at(rows, part * L::kUnitBytes + step * L::kStepBytes);
                  const auto& w = a[buffer][step];
                  wgmma(products, w[0], w[1], w[2], w[3], b, part == 0 && step == 0 ? add : 1);
                  wgmma(products, w[0], w[1], w[2], w[3], operand_at(b, L::kPartBytes), 1);
                }
                wgmma_commit();
                wgmma_wait<1>();
              }
            }
            if (add != 0) release(previous);
            previous = stage;
            add = 1;
            if (++stage == ring.stages) stage = 0, parity ^= 1;
            ++chunk;
          };
          while (chunk < stop) {
            multiply(0);
            if (kKind == TileKind::kBF16In12 && chunk < stop) multiply(1);
          }
          wgmma_wait<0>();
          wgmma_settled(products);
          release(previous);
#pragma unroll
          for (int i = 0; i < L::kValues; ++i) of_group[i] += products[i];
        }
        if (kSplit == 1 && range % kRangesOfGroup == kRangesOfGroup - 1) {
#pragma unroll
          for (int i = 0; i < L::kValues; ++i) sums[i] += of_group[i], of_group[i] = 0;
        }
      }

      if constexpr (kSplit == 1) {
        for_outputs.template operator()<L::kValues>(
            task, 0, [&](int value, const TileProduct& product, int64_t row, int64_t n) {
              finish<kKind>(sums[value], product, row, n, standing(product, row, n));
            });
      } else {
#pragma unroll
        for (int i = 0; i < L::kRounds; ++i, ++rounds) {
          if (rounds > 0) receive(rounds - 1);
          __syncwarp();
          send(rounds, of_group + i * L::kRoundValues);
        }
      }
    }
    if (kSplit > 1 && rounds > 0) receive(rounds - 1);
  }
  // Nobody leaves while another may still write to it.
  if constexpr (kSplit > 1) cluster_barrier();
#endif
}

// Rows of x in a task. More of them need more registers for sums than there are.
constexpr int tokens_of_task(int64_t rows, int most) {
  int tokens = 16;
  while (tokens < rows && tokens < most) tokens *= 2;
  return tokens;
}

// How many clusters of kSplit blocks run at once: not all multiprocessors have neighbours for one.
template <TileKind kKind, int kTokens, int kSplit>
cudaError_t clusters_at_once(int& clusters) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = kSplit;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kMaxSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto kernel = tile_gemm_kernel<kKind, kTokens, kSplit>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  return error == cudaSuccess && clusters == 0 ? cudaErrorLaunchOutOfResources : error;
}

template <TileKind kKind, int kTokens, int kSplit>
cudaError_t launch_split(const TileLinear& args, cudaStream_t stream) {
  using L = Layout<kKind, kTokens, kSplit>;
  static_assert(kSplit == 1 || kSplit == kGroups);
  int clusters = 0;
  cudaError_t error = clusters_at_once<kKind, kTokens, kSplit>(clusters);
  if (error != cudaSuccess) return error;
  const int row_blocks = static_cast<int>((args.rows + kTokens - 1) / kTokens);
  const int units = static_cast<int>((args.k + 127) / 128 * 2);
  const int tasks = tile_count(args, kGemmRows) * row_blocks;
  constexpr int kColumns = Tiles<kKind>::kColumns;
  const int chunks = static_cast<int>((args.k + kColumns - 1) / kColumns);
  const Ring ring = ring_of<L>(row_blocks, (chunks + kSplit - 1) / kSplit);
  const dim3 split_grid(static_cast<unsigned>(units),
                        static_cast<unsigned>((row_blocks * kTokens + 31) / 32));
  if (args.prepare == Prepare::kNorm) {
    // Few rows leave multiprocessors for halves of the columns.
    const auto norm_blocks = static_cast<unsigned>(row_blocks * kTokens / kNormRows);
    launch_early(norm_and_split_rows<kKind, kTokens>, dim3(norm_blocks, norm_blocks <= 64 ? 2 : 1),
                 kNormThreads, 0, stream, args, units);
  } else {
    launch_early(split_rows<kKind, kTokens>, split_grid, 256, 0, stream, args, units);
  }
  launch_early_clusters(tile_gemm_kernel<kKind, kTokens, kSplit>, std::min(tasks, clusters) * kSplit,
                        kThreads, kSplit, kMaxSharedBytes, stream, args, tasks, row_blocks, units, ring);
  return cudaGetLastError();
}

template <TileKind kKind>
cudaError_t launch(const TileLinear& args, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  constexpr int kMost = kKind == TileKind::kBF16 ? 128 : 64;
  switch (tokens_of_task(args.rows, kMost)) {
    case 16:
      return launch_split<kKind, 16, 4>(args, stream);
    case 32:
      return launch_split<kKind, 32, 4>(args, stream);
    default:
      if (Tiles<kKind>::kIsBF16 && args.rows <= 64) return launch_split<kKind, 64, 4>(args, stream);
  }
  // A quarter of a task each is more even, a whole one is faster in itself.
  const int64_t tasks = tile_count(args, kGemmRows) * ((args.rows + kMost - 1) / kMost);
  const int64_t quarters_whole = (tasks + multiprocessors - 1) / multiprocessors * 4;
  const int64_t quarters_split = (tasks + multiprocessors / 4 - 1) / (multiprocessors / 4);
  return quarters_split * 3 < quarters_whole * 2 ? launch_split<kKind, kMost, 4>(args, stream)
                                                 : launch_split<kKind, kMost, 1>(args, stream);
}

}  // namespace

int64_t tile_gemm_workspace_bytes(int64_t rows, int64_t k) {
  const int64_t tokens = tokens_of_task(rows, 128);
  return (rows + tokens - 1) / tokens * tokens * ((k + 127) / 128 * 128) * 4;
}

cudaError_t tile_gemm(TileKind kind, const TileLinear& args, cudaStream_t stream) {
  return with_kind(kind, [&]<TileKind kKind>() { return launch<kKind>(args, stream); });
}

}  // namespace nibble::cuda
