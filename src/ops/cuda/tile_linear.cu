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

// The rings, their barriers, the factors of norms, the sums of two tasks; rows that are prepared come behind
// them.
constexpr int kBarrierBytes = kWarps * kStages * 8, kFactorBytes = 128;
template <int kTiles>
constexpr int kTaskSums = kWarps* kTiles * 8 * 32;
template <TileKind kKind, int kTiles>
constexpr int kSharedBytes =
    kWarps* kStages* Tiles<kKind>::kBytes + kBarrierBytes + kFactorBytes + 2 * kTaskSums<kTiles> * 4;
static_assert(kFactorBytes >= few_rows(TileKind::kBF16) * sizeof(float));

// A prepared row: its columns in chunks, zero beyond k, four of them split in two parts. In a chunk those
// that lanes q = 0..3 read at the same time lie side by side, and rows are apart so that those of two rows
// are in different banks.
__host__ __device__ constexpr int prepared_pitch(int64_t k) {
  return static_cast<int>((k + 127) / 128 * 128) + 16;
}
int64_t prepared_bytes(int64_t rows, int64_t k) { return rows * prepared_pitch(k) * 4; }
// Where four columns, of which `four` counts, lie in a row, in their 16 bytes.
template <TileKind kKind>
__device__ int prepared_place(int four) {
  constexpr int kOfChunk = Tiles<kKind>::kColumns / 4, kOfLane = kOfChunk / 4;
  const int in_chunk = four % kOfChunk;
  return four - in_chunk + in_chunk % kOfLane * 4 + in_chunk / kOfLane;
}
// What lane q reads of a chunk.
template <TileKind kKind>
__device__ SplitPiece prepared_piece(const float* row, int chunk, int part, int q) {
  SplitPiece piece = {};
  if (row == nullptr) return piece;
  const auto* fours = reinterpret_cast<const uint4*>(row + chunk * Tiles<kKind>::kColumns) + part * 16 + q;
#pragma unroll
  for (int v = 0; v < 4; ++v) piece.x[v] = fours[v * 4];
  return piece;
}

// Activated rows on their way, by all of a multiprocessor's threads.
template <TileKind kKind>
__device__ void activate_rows(const TileLinear& p, float* to) {
  const int k = static_cast<int>(p.k), fours = (k + 127) / 128 * 32;
  const bool vectors =
      k % 4 == 0 && p.x_stride % 4 == 0 && p.up_stride % 4 == 0 && is_aligned(p.x) && is_aligned(p.up);
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(p.rows) * fours; i += kWarps * 32) {
    const int row = i / fours, c = i % fours * 4;
    const float4 x = load_four(p.x + row * p.x_stride, c, k, vectors);
    const float4 up = load_four(p.up + row * p.up_stride, c, k, vectors);
    const float4 h = {c < k ? activated(p.activation, x.x, up.x) : 0,
                      c + 1 < k ? activated(p.activation, x.y, up.y) : 0,
                      c + 2 < k ? activated(p.activation, x.z, up.z) : 0,
                      c + 3 < k ? activated(p.activation, x.w, up.w) : 0};
    reinterpret_cast<uint4*>(to + row * prepared_pitch(k))[prepared_place<kKind>(i % fours)] = split(h);
  }
  __syncthreads();
}

// Normed rows, likewise; and as they are, which others need, too: a share of them by each block. pieces:
// [rows][pieces of a row], factors [rows]: room.
template <TileKind kKind>
__device__ void norm_rows(const TileLinear& p, float* to, float* pieces, float* factors) {
  const int k = static_cast<int>(p.k), rows = static_cast<int>(p.rows),
            thread = static_cast<int>(threadIdx.x);
  const int fours = (k + 127) / 128 * 32, all = rows * fours, pieces_of_row = fours / 16;
  const bool vectors = k % 4 == 0 && p.x_stride % 4 == 0 && is_aligned(p.x) && is_aligned(p.norm);
  auto at = [&](int row, int four) {
    return reinterpret_cast<float4*>(to + row * prepared_pitch(k)) + prepared_place<kKind>(four);
  };
  constexpr int kFours = 4, kStep = kWarps * 32;  // of a thread at a time
  for (int first = thread; first - thread < all; first += kFours * kStep) {
    float4 x[kFours], weight[kFours];
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int i = first + j * kStep, row = i / fours, c = i % fours * 4;
      x[j] = weight[j] = {0, 0, 0, 0};
      if (i < all) {
        x[j] = load_four(p.x + row * p.x_stride, c, k, vectors);
        weight[j] = load_four(p.norm, c, k, vectors);
      }
    }
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int i = first + j * kStep;
      const float piece = piece_of_lanes(square_of(x[j]));
      if (i >= all) continue;
      *at(i / fours, i % fours) = times(x[j], weight[j]);
      if (i % 16 == 0) pieces[i / 16] = piece;
    }
  }
  __syncthreads();
  for (int row = thread / 32; row < rows; row += kWarps) {
    const float squares = add_chains(add_pieces(0, pieces + row * pieces_of_row, pieces_of_row));
    if (thread % 32 == 0) factors[row] = norm_factor(squares, k, p.eps);
  }
  __syncthreads();
  const int share = (all + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int begin = static_cast<int>(blockIdx.x) * share, end = begin + share;
  for (int i = thread; i < all; i += kStep) {
    const int row = i / fours, four = i % fours;
    const float4 x = times(*at(row, four), factors[row]);
    *reinterpret_cast<uint4*>(at(row, four)) = split(x);
    if (i >= begin && i < end) store_four(p.normed + row * p.normed_stride, four * 4, k, x);
  }
  __syncthreads();
}

// A warp owns a range of K and a ring of its chunks; a task is 32 weight rows of one matrix and kTiles * 8
// rows of x. kPrepares: each block prepares all of these, which are one tile.
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
  float* const factors = reinterpret_cast<float*>(behind + kBarrierBytes);
  // [range][token tile][weight tile][half][token % 2][lane]
  float* const sums_shared = reinterpret_cast<float*>(behind + kBarrierBytes + kFactorBytes);
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
  if (p.prepare == Prepare::kNorm) {
    constexpr int kLine = 128 / sizeof(float);
    for (int c = static_cast<int>(threadIdx.x) * kLine; c < p.k; c += kWarps * 32 * kLine)
      prefetch(p.norm + c);
  }
  dependency_wait();
  dependency_launch();

  const float* x = p.x;
  int64_t x_stride = p.x_stride;
  const bool vectors = p.k % T::kColumns == 0 && x_stride % 4 == 0 && is_aligned(x);
  if constexpr (kPrepares) {
    auto* prepared = reinterpret_cast<float*>(shared + kSharedBytes<kKind, kTiles>);
    if (p.prepare == Prepare::kNorm) {
      norm_rows<kKind>(p, prepared, sums_shared, factors);
    } else {
      activate_rows<kKind>(p, prepared);
    }
    x = prepared;
    x_stride = prepared_pitch(p.k);
  }
  float* sums_of_task = sums_shared;
  for (int task = blockIdx.x; task < tasks; task += static_cast<int>(gridDim.x)) {
    const int row0 = task % passes * kTokens;
    const float* rows[kTiles];  // this lane's token of each tile; null: no such row
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = row0 + n * kTokensOfTile + g;
      rows[n] = row < p.rows ? x + row * x_stride : nullptr;
    }
    // A piece of x ahead, which may have to come from L2.
    std::conditional_t<kPrepares, SplitPiece, RowPiece> next[kTiles];
    auto load = [&](int c, int part) {
      const int column = (first + c) * T::kColumns + step_column<kKind>(q, part, 0);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if constexpr (kPrepares) {
          next[n] = prepared_piece<kKind>(rows[n], first + c, part, q);
        } else {
          next[n] = load_piece(rows[n], column, k, vectors);
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
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              const uint32_t(&w)[4] = a[tile][step];
              mma_bf16(sums[n][tile], w[0], w[1], w[2], w[3], high[n][2 * step], high[n][2 * step + 1]);
            }
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              const uint32_t(&w)[4] = a[tile][step];
              mma_bf16(sums[n][tile], w[0], w[1], w[2], w[3], low[n][2 * step], low[n][2 * step + 1]);
            }
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
  const int64_t prepared = kPrepares ? prepared_bytes(args.rows, args.k) : 0;
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

// Whether so many rows are done by tile_gemm.
static bool is_gemm([[maybe_unused]] TileKind kind, [[maybe_unused]] int64_t rows) {
#ifdef NIBBLE_SM90A
  int device = 0, major = 0;
  return rows > few_rows(kind) && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
#else
  return false;
#endif
}

bool can_prepare(TileKind kind, int64_t rows, int64_t k) {
  if (is_gemm(kind, rows)) return true;
  if (rows > few_rows(kind)) return false;
  const int shared = with_kind(kind, []<TileKind kKind>() -> int { return kSharedBytes<kKind, 1>; });
  return shared + prepared_bytes(rows, k) <= kMaxSharedBytes;
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
