#include <algorithm>
#include <type_traits>

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear_tiles.cuh"
#include "ops/cuda/tile_gemm.h"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {
namespace {

constexpr int kWarps = kRanges;
constexpr int kStages = 2;  // chunks of a warp that are under way; more of them slow down what runs before
constexpr int kTokensOfTile = 8;

// The rings, their barriers, the sums of two tasks; a prepared row comes behind them.
constexpr int kBarrierBytes = kWarps * kStages * 8;
template <int kTiles>
constexpr int kTaskSums = kWarps* kTiles * 8 * 32;
template <TileKind kKind, int kTiles>
constexpr int kSharedBytes =
    kWarps* kStages* Tiles<kKind>::kBytes + kBarrierBytes + 2 * kTaskSums<kTiles> * 4;
static_assert(kNormPieces <= kTaskSums<1>);

// A prepared row: its columns in chunks, zero beyond k, four of them split in two parts. In a chunk those
// that lanes q = 0..3 read at the same time lie side by side.
int64_t prepared_bytes(int64_t k) { return (k + 127) / 128 * 128 * 4; }
// Where four columns, of which `four` counts, lie in a row, in their 16 bytes.
template <TileKind kKind>
__device__ int prepared_place(int four) {
  constexpr int kOfChunk = Tiles<kKind>::kColumns / 4, kOfLane = kOfChunk / 4;
  const int in_chunk = four % kOfChunk;
  if constexpr (kKind == TileKind::kQ4) {  // two fours of a lane, then of the next
    return four - in_chunk + (in_chunk / 8 * 2 + in_chunk % 2) * 4 + in_chunk / 2 % 4;
  }
  return four - in_chunk + in_chunk % kOfLane * 4 + in_chunk / kOfLane;
}
// What lane q reads of a chunk. row null: zeros.
template <TileKind kKind>
__device__ SplitPiece prepared_piece(const uint4* row, int chunk, int part, int q) {
  SplitPiece piece = {};
  if (row == nullptr) return piece;
  const uint4* fours = row + chunk * (Tiles<kKind>::kColumns / 4) + part * 16 + q;
#pragma unroll
  for (int v = 0; v < 4; ++v) piece.x[v] = fours[v * 4];
  return piece;
}

// The row on its way, by all of a multiprocessor's threads; normed, also as it is, since others need it: a
// share of it by each block. pieces [kNormPieces]: room.
template <TileKind kKind>
__device__ void prepare_row(const TileLinear& p, float* pieces, uint4* to) {
  const int k = static_cast<int>(p.k), thread = static_cast<int>(threadIdx.x);
  constexpr int kStep = kWarps * 32 * 4;  // columns
  auto put = [&](int c, const float4& x) { to[prepared_place<kKind>(c / 4)] = split(x); };
  if (p.prepare == Prepare::kNorm) {
    const int blocks = static_cast<int>(gridDim.x), share = (k + 4 * blocks - 1) / (4 * blocks) * 4;
    const int begin = static_cast<int>(blockIdx.x) * share;
    rms_norm_row(p.x, p.norm, k, p.eps, pieces, [&](int64_t column, const float4& x) {
      const auto c = static_cast<int>(column);
      put(c, x);
      if (c >= begin && c < begin + share) store_four(p.normed, c, k, x);
    });
  } else {
    for (int c = thread * 4; c < k; c += kStep) {
      const float4 x = load_four(p.x, c, k), up = load_four(p.up, c, k);
      auto h = [&](int i, float gate, float up_value) {
        return c + i < k ? activated(p.activation, gate, up_value) : 0.0f;
      };
      put(c, {h(0, x.x, up.x), h(1, x.y, up.y), h(2, x.z, up.z), h(3, x.w, up.w)});
    }
  }
  for (int c = (k + 3) / 4 * 4 + thread * 4; c < (k + 127) / 128 * 128; c += kStep) put(c, {0, 0, 0, 0});
  __syncthreads();
}

// A warp owns a range of K and a ring of its chunks; a task is 32 weight rows of one matrix and kTiles * 8
// rows of x. kPrepares: x is one row, which each block prepares.
template <TileKind kKind, int kTiles, bool kPrepares>
__global__ void __launch_bounds__(kWarps * 32, 1) tile_linear_kernel(TileLinear p, int tasks, int passes) {
#ifdef NIBBLE_HOPPER_OR_LATER
  using T = Tiles<kKind>;
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kTokens = kTiles * kTokensOfTile;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, q = lane % 4;
  uint8_t* const stages = shared + warp * kStages * T::kBytes;
  uint8_t* const behind = shared + kWarps * kStages * T::kBytes;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(behind) + warp * kStages;
  // [range][token tile][weight tile][half][token % 2][lane]
  float* const sums_shared = reinterpret_cast<float*>(behind + kBarrierBytes);
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(barriers + i);
    barrier_init_fence();
  }
  __syncwarp();

  const auto k = static_cast<int>(p.k);
  const int all = (k + T::kColumns - 1) / T::kColumns;
  const int first = range_begin(warp, all), chunks = range_begin(warp + 1, all) - first;
  const uint64_t policy = evict_first_policy();
  int next_task = blockIdx.x, left = 0, stage = 0;
  uint32_t parity = 0;
  const uint8_t* from = nullptr;
  auto feed = [&](int at) {
    if (left == 0) {
      if (next_task >= tasks || chunks == 0) return;
      const TilePlace next = tile_place(p, next_task / passes, kTaskRows);
      from = next.product.tiles + (static_cast<int64_t>(next.tile) * all + first) * T::kBytes;
      left = chunks;
      next_task += static_cast<int>(gridDim.x);
    }
    barrier_expect(barriers + at, T::kBytes);
    bulk_copy(stages + at * T::kBytes, from, T::kBytes, barriers + at, policy);
    from += T::kBytes;
    --left;
  };
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) feed(i);  // weights do not wait for the kernel before
  }
  if (kPrepares && p.prepare == Prepare::kNorm) {
    constexpr int kLine = 128 / sizeof(float);
    for (int c = static_cast<int>(threadIdx.x) * kLine; c < p.k; c += kWarps * 32 * kLine)
      prefetch(p.norm + c);
  }
  dependency_wait();
  dependency_launch();

  const bool vectors = p.k % T::kColumns == 0 && p.x_stride % 4 == 0 && is_aligned(p.x);
  auto* const prepared = reinterpret_cast<uint4*>(shared + kSharedBytes<kKind, kTiles>);
  if constexpr (kPrepares) prepare_row<kKind>(p, sums_shared, prepared);
  float* sums_of_task = sums_shared;
  for (int task = blockIdx.x; task < tasks; task += static_cast<int>(gridDim.x)) {
    const int row0 = task % passes * kTokens;
    const float* rows[kTiles];  // this lane's token of each tile; null: no such row
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = row0 + n * kTokensOfTile + g;
      rows[n] = row < p.rows ? p.x + row * p.x_stride : nullptr;
    }
    // A piece of x ahead, which may have to come from L2.
    std::conditional_t<kPrepares, SplitPiece, RowPiece> next[kTiles];
    auto load = [&](int c, int part) {
      const int column = (first + c) * T::kColumns + step_column<kKind>(q, part, 0);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if constexpr (kPrepares) {
          next[n] = prepared_piece<kKind>(g == 0 ? prepared : nullptr, first + c, part, q);
        } else {
          next[n] = load_piece<kKind>(rows[n], column, k, vectors);
        }
      }
    };
    constexpr int kValues = kTiles * 8, kSums = kTaskSums<kTiles>;
    const auto [product, pair] = tile_place(p, task / passes, kTaskRows);
    float before = 0;  // of this thread's output, asked for early
    if constexpr (kTiles == 1) {
      const int row = static_cast<int>(threadIdx.x) / kTaskRows;
      const int64_t n = int64_t{pair} * kTaskRows + threadIdx.x % kTaskRows;
      if (product.adds && row < p.rows && n < product.n) before = product.out[row * product.out_stride + n];
    }
    float sums[kTiles][2][4] = {};
    if (chunks > 0) load(0, 0);
    for (int c = 0; c < chunks; ++c) {
      barrier_wait(barriers + stage, parity);
      const uint8_t* const chunk = stages + stage * T::kBytes;
      BlockScales scales[2];
      if constexpr (T::kScalesSums) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) scales[tile] = load_block_scales(chunk, tile, lane);
      }
#pragma unroll
      for (int part = 0; part < T::kParts; ++part) {
        uint32_t high[kTiles][8], low[kTiles][8];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          split_piece(next[n], high[n], low[n]);
        }
        if (part + 1 < T::kParts) {
          load(c, part + 1);
        } else if (c + 1 < chunks) {
          load(c + 1, 0);
        }
        uint32_t a[2][4][4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) load_tile<kKind>(chunk, tile, lane, part, a[tile]);
        float of_block[kTiles][2][4];
        auto& products = first_if<T::kScalesSums>(of_block, sums);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          if (T::kScalesSums && step % 2 == 0) {
#pragma unroll
            for (int i = 0; i < kTiles * 8; ++i) of_block[i / 8][i / 4 % 2][i % 4] = 0;
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              const uint32_t(&w)[4] = a[tile][step];
              mma_bf16(products[n][tile], w[0], w[1], w[2], w[3], high[n][2 * step], high[n][2 * step + 1]);
            }
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              const uint32_t(&w)[4] = a[tile][step];
              mma_bf16(products[n][tile], w[0], w[1], w[2], w[3], low[n][2 * step], low[n][2 * step + 1]);
            }
          }
          if (T::kScalesSums && step % 2 == 1) {
#pragma unroll
            for (int i = 0; i < kTiles * 2; ++i)
              add_block<4>(scales[i % 2], part * 2 + step / 2, of_block[i / 2][i % 2], sums[i / 2][i % 2]);
          }
        }
      }
      // Behind the products: once they are issued, what was loaded from the stage is in registers. Right
      // behind the loads a copy has been seen to overtake them.
      __syncwarp();
      if (lane == 0) feed(stage);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      sums_of_task[(warp * kValues + v) * 32 + lane] = sums[v / 8][v / 4 % 2][v % 4];
    }
    __syncthreads();  // the next task's sums go elsewhere, and those behind it come behind its barrier
    for (int id = static_cast<int>(threadIdx.x); id < kValues * 32; id += kWarps * 32) {
      // Threads beside each other have weight rows beside each other.
      const int r = id % kTaskRows, token = id / kTaskRows;
      const int v = token / kTokensOfTile * 8 + r / 8 * 2 + token % 2;
      const int from_lane = r % 8 * 4 + token % kTokensOfTile / 2;
      const float sum = sum_of_ranges(sums_of_task + v * 32 + from_lane, kValues * 32);
      const int64_t n = static_cast<int64_t>(pair) * kTaskRows + r;
      if (n >= product.n || row0 + token >= p.rows) continue;
      if constexpr (kTiles > 1) {
        before = product.adds ? product.out[(row0 + token) * product.out_stride + n] : 0.0f;
      }
      finish<kKind>(sum, product, row0 + token, n, before);
    }
    sums_of_task = sums_of_task == sums_shared ? sums_shared + kSums : sums_shared;
  }
#endif
}

template <TileKind kKind, int kTiles, bool kPrepares>
cudaError_t launch(const TileLinear& args, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  const int64_t prepared = kPrepares ? prepared_bytes(args.k) : 0;
  const int shared = kSharedBytes<kKind, kTiles> + static_cast<int>(prepared);
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(tile_linear_kernel<kKind, kTiles, kPrepares>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int passes = static_cast<int>((args.rows + kTiles * kTokensOfTile - 1) / (kTiles * kTokensOfTile));
  const int tasks = tile_count(args, kTaskRows) * passes;
  launch_early(tile_linear_kernel<kKind, kTiles, kPrepares>, std::min(tasks, multiprocessors), kWarps * 32,
               static_cast<size_t>(shared), stream, args, tasks, passes);
  return cudaGetLastError();
}

template <TileKind kKind>
cudaError_t launch(const TileLinear& args, cudaStream_t stream) {
  if (args.prepare != Prepare::kNothing) return launch<kKind, 1, true>(args, stream);
  return args.rows <= kTokensOfTile ? launch<kKind, 1, false>(args, stream)
                                    : launch<kKind, 2, false>(args, stream);
}

}  // namespace

bool has_wgmma() {
#ifdef NIBBLE_SM90A
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
#else
  return false;
#endif
}

// Whether so many rows are done by tile_gemm.
static bool is_gemm(TileKind kind, int64_t rows) { return rows > few_rows(kind) && has_wgmma(); }

bool can_prepare(TileKind kind, int64_t rows, int64_t k) {
  if (is_gemm(kind, rows)) return true;
  if (rows != 1) return false;  // several are prepared faster by a kernel of their own
  const int shared = with_kind(kind, [&]<TileKind kKind>() -> int { return kSharedBytes<kKind, 1>; });
  return shared + prepared_bytes(k) <= kMaxSharedBytes;
}

int64_t tile_linear_workspace_bytes(TileKind kind, int64_t rows, int64_t k) {
  return rows <= few_rows(kind) ? 0 : tile_gemm_workspace_bytes(rows, k);
}

cudaError_t tile_linear_few(TileKind kind, const TileLinear& args, cudaStream_t stream) {
  return with_kind(kind, [&]<TileKind kKind>() { return launch<kKind>(args, stream); });
}

cudaError_t tile_linear(TileKind kind, const TileLinear& args, cudaStream_t stream) {
  if (args.rows == 0 || args.count == 0) return cudaSuccess;
#ifdef NIBBLE_SM90A
  if (is_gemm(kind, args.rows)) return tile_gemm(kind, args, stream);
#endif
  return tile_linear_few(kind, args, stream);
}

}  // namespace nibble::cuda
