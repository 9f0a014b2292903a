#include <algorithm>

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/moe_decode.h"
#include "ops/cuda/moe_tiles.h"
#include "ops/cuda/primitives.cuh"
#include "ops/cuda/tile_decode.cuh"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 16;  // the parts of K
constexpr int kStages = 2;  // chunks of a warp that are under way
constexpr int kTaskRows = 2 * kTileRows;
constexpr int kTokensOfTile = 4;  // an MMA's 8 columns: both parts of four tokens

// kBF16: a chunk has 64 columns: [2 tiles][2 halves][2][32 lanes][16 bytes]; of lane 4 g + q, columns 16 q ..
// 16 q + 7 and then 16 q + 8 .. of row 8 half + g. The 4-bit formats are those of moe_tiles.h, with 128
// columns.
enum class Kind { kBF16, kNvfp4, kMxfp4 };

template <Kind kKind>
struct Tiles {
  static constexpr int kBlock = kKind == Kind::kNvfp4 ? 16 : 32;
  static constexpr int kParts = kKind == Kind::kBF16 ? 1 : 2;  // of 16 columns of each lane
  static constexpr int kColumns = 64 * kParts;
  static constexpr int kBytes = kKind == Kind::kBF16 ? 4096 : chunk_bytes(kBlock);
};

__global__ void make_bf16_tiles(const uint16_t* codes, int n, int k, uint8_t* to, int64_t units) {
  const int chunks = (k + 63) / 64;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < units;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int lane = id % 32, v = id / 32 % 2, half = id / 64 % 2, tile = id / 128 % 2;
    const int chunk = id / 256 % chunks;
    const int64_t row = id / 256 / chunks * kTaskRows + tile * kTileRows + half * 8 + lane / 4;
    const int column = chunk * 64 + lane % 4 * 16 + v * 8;
    uint32_t words[4] = {};
    for (int i = 0; i < 8; ++i) {
      if (row < n && column + i < k)
        words[i / 2] |= static_cast<uint32_t>(codes[row * k + column + i]) << (16 * (i % 2));
    }
    reinterpret_cast<uint4*>(to)[id] = {words[0], words[1], words[2], words[3]};
  }
}

// Sixteen columns of this lane's token and part as eight pairs.
__device__ inline void load_rows(const float* row, int column, int k, bool vectors, uint32_t low_part,
                                 uint32_t (&b)[8]) {
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    float4 x = {0, 0, 0, 0};
    const int c = column + 4 * v;
    if (row != nullptr) {
      if (vectors) {
        x = *reinterpret_cast<const float4*>(row + c);
      } else {
        if (c < k) x.x = row[c];
        if (c + 1 < k) x.y = row[c + 1];
        if (c + 2 < k) x.z = row[c + 2];
        if (c + 3 < k) x.w = row[c + 3];
      }
    }
    b[2 * v] = part_of(x.x, x.y, low_part);
    b[2 * v + 1] = part_of(x.z, x.w, low_part);
  }
}

// The two parts of x: [rows, 2, K'], K' rounded up to 128.
template <Kind kKind>
__global__ void split_rows(const float* x, int64_t x_stride, int k, __nv_bfloat16* to) {
  dependency_launch();
  const int columns = (k + 127) / 128 * 128;
  const int64_t row = blockIdx.x;
  const int c = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (c >= columns) return;
  __nv_bfloat16* at = to + row * 2 * columns + operand_place<16 * Tiles<kKind>::kParts>(c);
  split(c < k ? x[row * x_stride + c] : 0.0f, at[0], at[columns]);
}

__device__ inline void load_split(const __nv_bfloat16* at, uint32_t (&b)[8]) {
  if (at == nullptr) {
#pragma unroll
    for (uint32_t& pair : b) pair = 0;
    return;
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const uint4 bits = *reinterpret_cast<const uint4*>(at + v * 32);
    b[4 * v] = bits.x, b[4 * v + 1] = bits.y, b[4 * v + 2] = bits.z, b[4 * v + 3] = bits.w;
  }
}

template <Kind kKind>
__device__ inline void load_weights(const uint8_t* chunk, int lane, int part, uint32_t (&a)[2][2][8]) {
  using T = Tiles<kKind>;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    if constexpr (kKind == Kind::kBF16) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const uint4 bits =
              *reinterpret_cast<const uint4*>(chunk + ((tile * 2 + half) * 2 + v) * 512 + lane * 16);
          a[tile][half][4 * v] = bits.x, a[tile][half][4 * v + 1] = bits.y;
          a[tile][half][4 * v + 2] = bits.z, a[tile][half][4 * v + 3] = bits.w;
        }
      }
    } else {
      constexpr int kScaleBytes = 2 * 32 / T::kBlock;
      const uint8_t* at =
          chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(T::kBlock) + lane * kScaleBytes;
      uint32_t scales;
      if constexpr (kScaleBytes == 4) {
        scales = *reinterpret_cast<const uint32_t*>(at);
      } else {
        scales = *reinterpret_cast<const uint16_t*>(at);
      }
      const uint32_t both = scale_pair<T::kBlock>(scales, part);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 words = *reinterpret_cast<const uint2*>(chunk + tile * kTileCodeBytes + half * 512 +
                                                            lane * 16 + part * 8);
        const uint32_t scale = half == 0 ? low_twice(both) : high_twice(both);
        uint32_t pairs[2][4];
        decode(words.x, pairs[0]);
        decode(words.y, pairs[1]);
#pragma unroll
        for (int p = 0; p < 8; ++p) a[tile][half][p] = mul_bf16x2(pairs[p / 4][p % 4], scale);
      }
    }
  }
}

// The rings, their barriers and the sums; rows that are prepared come behind them.
template <Kind kKind, int kTiles>
constexpr int kSharedBytes = kWarps* kStages* Tiles<kKind>::kBytes + 256 + kWarps * 32 * 4 * kTiles * 4;
constexpr int kMaxSharedBytes = 227 << 10;  // of a multiprocessor
int64_t prepared_bytes(int64_t rows, int64_t k) { return rows * ((k + 127) / 128 * 128) * 4; }

// Rows of x on their way, by all of a multiprocessor's threads: [rows, K'], zero beyond k.
static_assert(kWideNormThreads == kWarps * 32);
__device__ void prepare_rows(const TileLinear& p, float* to, float* s_warps) {
  const int k = static_cast<int>(p.k), columns = (k + 127) / 128 * 128;
  for (int r = 0; r < p.rows; ++r, to += columns) {
    const float* x = p.x + r * p.x_stride;
    if (p.prepare == Prepare::kNorm) {
      const float factor = rms_factor(x, k, p.eps, s_warps);
      rms_scale(x, p.norm, factor, k, to);
      if (blockIdx.x == 0) rms_scale(x, p.norm, factor, k, p.normed + r * p.normed_stride);
    } else {
      const float* up = p.up + r * p.up_stride;
      for (int c = static_cast<int>(threadIdx.x); c < k; c += kWarps * 32)
        to[c] = activated(p.activation, x[c], up[c]);
    }
    for (int c = k + static_cast<int>(threadIdx.x); c < columns; c += kWarps * 32) to[c] = 0;
  }
  __syncthreads();
}

template <Kind kKind, int kTiles, bool kSplit>
__global__ void __launch_bounds__(kWarps * 32, 1) tile_linear_kernel(TileLinear p, int tasks, int passes) {
  using T = Tiles<kKind>;
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kTokens = kTiles * kTokensOfTile;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, q = lane % 4;
  uint8_t* const stages = shared + warp * kStages * T::kBytes;
  uint64_t* const barriers =
      reinterpret_cast<uint64_t*>(shared + kWarps * kStages * T::kBytes) + warp * kStages;
  // [warp][tile][n][row half][lane]
  float* const sums_shared = reinterpret_cast<float*>(shared + kWarps * kStages * T::kBytes + 256);
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(barriers + i);
    barrier_init_fence();
  }
  __syncwarp();

  const int all = (static_cast<int>(p.k) + T::kColumns - 1) / T::kColumns;
  const int first = warp * all / kWarps, chunks = (warp + 1) * all / kWarps - first;
  // A task is 32 weight rows of one matrix and kTokens rows of x; neighbours share the weights.
  struct Place {
    const TileProduct& product;
    int pair;  // of tiles of that matrix
  };
  auto place_of = [&](int task) -> Place {
    int pair = task / passes, i = 0;
    for (;; ++i) {
      const int pairs = static_cast<int>((p.products[i].n + kTaskRows - 1) / kTaskRows);
      if (pair < pairs) return {p.products[i], pair};
      pair -= pairs;
    }
  };
  const uint64_t policy = evict_first_policy();
  int next_task = blockIdx.x, left = 0, stage = 0;
  uint32_t parity = 0;
  const uint8_t* from = nullptr;
  auto feed = [&](int at) {
    if (left == 0) {
      if (next_task >= tasks || chunks == 0) return;
      const Place next = place_of(next_task);
      from = next.product.tiles + (static_cast<int64_t>(next.pair) * all + first) * T::kBytes;
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
  bool vectors = p.k % T::kColumns == 0 && x_stride % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  if constexpr (!kSplit) {
    if (p.prepare != Prepare::kNothing) {
      auto* prepared = reinterpret_cast<float*>(shared + kSharedBytes<kKind, kTiles>);
      prepare_rows(p, prepared, sums_shared);
      x = prepared;
      x_stride = (p.k + 127) / 128 * 128;
      vectors = true;
    }
  }
  const uint32_t low_part = g % 2 != 0 ? ~0u : 0u;
  for (int task = blockIdx.x; task < tasks; task += static_cast<int>(gridDim.x)) {
    const int row0 = task % passes * kTokens;
    // This lane's token and part of each tile of tokens; null: no such row.
    const float* rows[kTiles];
    const __nv_bfloat16* split[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = row0 + n * kTokensOfTile + g / 2;
      const bool is_row = row < p.rows;
      rows[n] = !kSplit && is_row ? x + row * x_stride : nullptr;
      split[n] = kSplit && is_row ? static_cast<const __nv_bfloat16*>(p.workspace) +
                                        (int64_t{row} * 2 + g % 2) * ((p.k + 127) / 128 * 128) + q * 8
                                  : nullptr;
    }
    auto load_b = [&](int n, int c, int part, uint32_t(&b)[8]) {
      if constexpr (kSplit) {
        const __nv_bfloat16* at = split[n];
        if (at != nullptr) at += (first + c) * T::kColumns + part * 64;
        load_split(at, b);
      } else {
        load_rows(rows[n], (first + c) * T::kColumns + q * 16 * T::kParts + part * 16, static_cast<int>(p.k),
                  vectors, low_part, b);
      }
    };
    float sums[2][kTiles][4] = {};
    for (int c = 0; c < chunks; ++c) {
      uint32_t b[kTiles][8];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) load_b(n, c, 0, b[n]);
      barrier_wait(barriers + stage, parity);
      const uint8_t* const chunk = stages + stage * T::kBytes;
#pragma unroll
      for (int part = 0; part < T::kParts; ++part) {
        uint32_t a[2][2][8];
        load_weights<kKind>(chunk, lane, part, a);
        if (part == T::kParts - 1) {
          __syncwarp();
          if (lane == 0) feed(stage);
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (part > 0) load_b(n, c, part, b[n]);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              mma_bf16(sums[tile][n], a[tile][0][2 * m], a[tile][1][2 * m], a[tile][0][2 * m + 1],
                       a[tile][1][2 * m + 1], b[n][2 * m], b[n][2 * m + 1]);
            }
          }
        }
      }
    }
    // Both parts of a token are neighbours; then the sixteen parts of K, in order.
    constexpr int kValues = 2 * kTiles * 2;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float* s = sums[v / (kTiles * 2)][v / 2 % kTiles] + v % 2 * 2;
      sums_shared[(warp * kValues + v) * 32 + lane] = s[0] + s[1];
    }
    __syncthreads();
    const auto [product, pair] = place_of(task);
    for (int id = static_cast<int>(threadIdx.x); id < kValues * 32; id += kWarps * 32) {
      // Threads beside each other have weight rows beside each other.
      const int r = id % kTaskRows, token = id / kTaskRows;
      const int v = r / kTileRows * kTiles * 2 + token / kTokensOfTile * 2 + r / 8 % 2;
      const int from_lane = r % 8 * 4 + token % kTokensOfTile;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums_shared[(w * kValues + v) * 32 + from_lane];
      const int64_t n = static_cast<int64_t>(pair) * kTaskRows + r;
      if (n >= product.n || row0 + token >= p.rows) continue;
      sum *= product.scale * (kKind == Kind::kBF16 ? 1.0f : kUnscale);
      if (product.bias != nullptr) sum += product.bias[n];
      float* out = product.out + (row0 + token) * product.out_stride + n;
      *out = product.adds ? *out + sum : sum;
    }
    __syncthreads();
  }
}

template <Kind kKind, int kTiles, bool kSplit>
cudaError_t launch(const TileLinear& args, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  const int64_t prepared = args.prepare != Prepare::kNothing ? prepared_bytes(args.rows, args.k) : 0;
  const int shared = kSharedBytes<kKind, kTiles> + static_cast<int>(prepared);
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(tile_linear_kernel<kKind, kTiles, kSplit>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  if constexpr (kSplit) {
    const dim3 grid(static_cast<unsigned>(args.rows), static_cast<unsigned>((args.k + 127) / 128));
    split_rows<kKind><<<grid, 128, 0, stream>>>(args.x, args.x_stride, static_cast<int>(args.k),
                                                static_cast<__nv_bfloat16*>(args.workspace));
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  int64_t pairs = 0;
  for (int i = 0; i < args.count; ++i) pairs += (args.products[i].n + kTaskRows - 1) / kTaskRows;
  const int passes = static_cast<int>((args.rows + kTiles * kTokensOfTile - 1) / (kTiles * kTokensOfTile));
  const int tasks = static_cast<int>(pairs) * passes;
  launch_early(tile_linear_kernel<kKind, kTiles, kSplit>, std::min(tasks, multiprocessors), kWarps * 32,
               static_cast<size_t>(shared), stream, args, tasks, passes);
  return cudaGetLastError();
}

template <Kind kKind>
cudaError_t launch(const TileLinear& args, cudaStream_t stream) {
  if (args.rows <= kTokensOfTile) return launch<kKind, 1, false>(args, stream);
  if (args.rows <= 2 * kTokensOfTile) return launch<kKind, 2, true>(args, stream);
  return launch<kKind, 4, true>(args, stream);
}

}  // namespace

bool has_tiles(MatrixFormat format) {
  return format == MatrixFormat::kBF16 || format == MatrixFormat::kNvfp4 || format == MatrixFormat::kMxfp4;
}

int64_t tile_bytes(MatrixFormat format, int64_t n, int64_t k) {
  const int64_t pairs = (n + kTaskRows - 1) / kTaskRows;
  if (format == MatrixFormat::kBF16) return pairs * ((k + 63) / 64) * Tiles<Kind::kBF16>::kBytes;
  return pairs * ((k + 127) / 128) * chunk_bytes(format == MatrixFormat::kNvfp4 ? 16 : 32);
}

bool can_prepare(Prepare prepare, MatrixFormat format, int64_t rows, int64_t k) {
  if (rows > kTokensOfTile || (prepare == Prepare::kNorm && norm_threads(k) != kWideNormThreads))
    return false;
  const int shared = format == MatrixFormat::kBF16    ? kSharedBytes<Kind::kBF16, 1>
                     : format == MatrixFormat::kNvfp4 ? kSharedBytes<Kind::kNvfp4, 1>
                                                      : kSharedBytes<Kind::kMxfp4, 1>;
  return shared + prepared_bytes(rows, k) <= kMaxSharedBytes;
}

int64_t tile_linear_workspace_bytes(int64_t rows, int64_t k) {
  return rows <= kTokensOfTile ? 0 : rows * 2 * ((k + 127) / 128 * 128) * 2;
}

cudaError_t make_tiles(const Matrix& m, uint8_t* to, cudaStream_t stream) {
  const int n = static_cast<int>(m.n), k = static_cast<int>(m.k);
  if (m.format != MatrixFormat::kBF16) {
    return make_4bit_tiles(static_cast<const uint8_t*>(m.codes), static_cast<const uint8_t*>(m.scales), n, k,
                           m.format == MatrixFormat::kNvfp4 ? 16 : 32, to, stream);
  }
  const int64_t units = tile_bytes(m.format, m.n, m.k) / 16;
  make_bf16_tiles<<<static_cast<unsigned>(std::min<int64_t>((units + 255) / 256, 65535)), 256, 0, stream>>>(
      static_cast<const uint16_t*>(m.codes), n, k, to, units);
  return cudaGetLastError();
}

cudaError_t tile_linear(MatrixFormat format, const TileLinear& args, cudaStream_t stream) {
  if (args.rows == 0 || args.count == 0) return cudaSuccess;
  switch (format) {
    case MatrixFormat::kBF16:
      return launch<Kind::kBF16>(args, stream);
    case MatrixFormat::kNvfp4:
      return launch<Kind::kNvfp4>(args, stream);
    case MatrixFormat::kMxfp4:
      return launch<Kind::kMxfp4>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
