// Weights on their way into tiles (tile_linear.h).
#include <algorithm>

#include "ops/cuda/gguf_split.h"
#include "ops/cuda/linear_tiles.cuh"
#include "ops/cuda/moe_decode.h"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {
namespace {

__global__ void make_bf16_tiles(const uint16_t* codes, int n, int k, uint8_t* to, int64_t units) {
  const int chunks = (k + 63) / 64;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < units;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int r = id % 8, eight = id / 8 % 2, step = id / 16 % 4, half = id / 64 % 2, tile = id / 128 % 2;
    const int chunk = id / 256 % chunks;
    const int64_t row = id / 256 / chunks * kTaskRows + tile * kTileRows + half * 8 + r;
    uint32_t words[4] = {};
    for (int i = 0; i < 8; ++i) {
      const int column = chunk * 64 + step_column<TileKind::kBF16>(i / 2, 0, step) + 2 * eight + i % 2;
      if (row < n && column < k)
        words[i / 2] |= static_cast<uint32_t>(codes[row * k + column]) << (16 * (i % 2));
    }
    reinterpret_cast<uint4*>(to)[id] = {words[0], words[1], words[2], words[3]};
  }
}

// A block a chunk.
constexpr int kPackThreads = 256;
__global__ void __launch_bounds__(kPackThreads)
    make_bf16_in_12_tiles(const uint16_t* codes, int n, int k, uint8_t* to, int64_t chunks,
                          int* does_not_fit) {
  namespace packed = bf16_in_12;
  constexpr int kExponents = 256, kMostBase = kExponents - packed::kWindow;
  constexpr uint32_t kNone = ~0u;
  __shared__ int weights_of[kExponents];  // how many weights have an exponent
  __shared__ int best;                    // weights in a window, and its base from above
  __shared__ uint32_t exceptions[4];      // of each two steps
  const int chunks_of_row = (k + 63) / 64, thread = static_cast<int>(threadIdx.x);
  // A thread has the words of a lane and step: four operands of two weights.
  const int lane = thread % 32, step = thread / 32 % 4, tile = thread / 128;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    uint8_t* const at = to + chunk * packed::kBytes;
    auto* const list = reinterpret_cast<uint32_t*>(at + packed::kWordBytes + 8);
    weights_of[thread] = 0;
    if (thread == 0) best = 0;
    if (thread < 4) exceptions[thread] = 0;
    if (thread < packed::kMaxExceptions) list[thread] = 0;
    __syncthreads();
    uint32_t weights[4][2];
    bool is_there[4][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int operand = i / 2;
      const int64_t row = chunk / chunks_of_row * kTaskRows + tile * kTileRows + operand % 2 * 8 + lane / 4;
      const int64_t column = chunk % chunks_of_row * 64 +
                             step_column<TileKind::kBF16In12>(lane % 4, 0, step) + operand / 2 * 2 + i % 2;
      is_there[operand][i % 2] = row < n && column < k;
      weights[operand][i % 2] = is_there[operand][i % 2] ? codes[row * k + column] : 0;
      if (is_there[operand][i % 2]) atomicAdd(weights_of + (weights[operand][i % 2] >> 7 & 255), 1);
    }
    __syncthreads();
    if (thread <= kMostBase) {
      int inside = 0;
      for (int e = 0; e < packed::kWindow; ++e) inside += weights_of[thread + e];
      atomicMax(&best, inside * kExponents + thread);
    }
    __syncthreads();
    const int base = best % kExponents;
    uint32_t operands[4] = {}, place[8];
    const int two_steps = tile * 2 + step / 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int operand = i / 2, half = i % 2;
      const uint32_t bits = weights[operand][half];
      // What is not there is any finite number: it meets zeros of x, or is of no output.
      place[i] = kNone;
      int exponent = is_there[operand][half] ? static_cast<int>(bits >> 7 & 255) - base : 0;
      if (exponent < 0 || exponent >= packed::kWindow) {
        exponent = 0;
        place[i] = atomicAdd(exceptions + two_steps, 1);
      }
      operands[operand] |= ((bits & 0x807F) | exponent << 7) << (16 * half);
    }
    uint32_t words[3];
    packed::pack(operands, words);
    uint8_t* const words_at = at + two_steps * packed::kTwoStepsBytes;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      *reinterpret_cast<uint32_t*>(words_at + packed::word_place(lane, step % 2 * 3 + i)) = words[i];
    __syncthreads();
    uint32_t ends = 0, end = 0, begin = 0;
    for (int group = 0; group < 4; ++group) {
      if (group == two_steps) begin = end;
      end += exceptions[group];
      ends |= min(end, packed::kMaxExceptions) << (8 * group);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (place[i] != kNone && begin + place[i] < packed::kMaxExceptions)
        list[begin + place[i]] = packed::exception(weights[i / 2][i % 2], lane, step % 2 * 4 + i / 2, i % 2);
    }
    if (thread == 0) {
      auto* const head = reinterpret_cast<uint32_t*>(at + packed::kWordBytes);
      head[0] = static_cast<uint32_t>(base) * 0x00800080u;
      head[1] = ends;
      if (end > packed::kMaxExceptions) *does_not_fit = 1;
    }
    __syncthreads();
  }
}

// Blocks of a grid for so many units, each of which does some.
unsigned blocks_for(int64_t units, int64_t of_block) {
  return static_cast<unsigned>(std::min<int64_t>((units + of_block - 1) / of_block, 65535));
}

}  // namespace

bool has_tiles(MatrixFormat format) {
  const MatrixFormat split = split_format(format);
  return split == MatrixFormat::kBF16 || split == MatrixFormat::kNvfp4 || split == MatrixFormat::kMxfp4 ||
         split == MatrixFormat::kQ4;
}

TileKind tile_kind(const Matrix& m) {
  const MatrixFormat split = split_format(m.format);
  if (split == MatrixFormat::kNvfp4) return TileKind::kNvfp4;
  if (split == MatrixFormat::kMxfp4) return TileKind::kMxfp4;
  if (split == MatrixFormat::kQ4) return TileKind::kQ4;
  return m.in_12_bits ? TileKind::kBF16In12 : TileKind::kBF16;
}

int64_t tile_bytes(TileKind kind, int64_t n, int64_t k) {
  return with_kind(kind, [&]<TileKind kKind>() {
    using T = Tiles<kKind>;
    return (n + kTaskRows - 1) / kTaskRows * ((k + T::kColumns - 1) / T::kColumns) * T::kBytes;
  });
}

cudaError_t make_tiles(TileKind kind, const Matrix& m, uint8_t* to, int* does_not_fit, cudaStream_t stream) {
  const int n = static_cast<int>(m.n), k = static_cast<int>(m.k);
  const int64_t bytes = tile_bytes(kind, m.n, m.k);
  const auto* codes = static_cast<const uint16_t*>(m.codes);
  if (kind == TileKind::kBF16) {
    make_bf16_tiles<<<blocks_for(bytes / 16, 256), 256, 0, stream>>>(codes, n, k, to, bytes / 16);
  } else if (kind == TileKind::kBF16In12) {
    const int64_t chunks = bytes / bf16_in_12::kBytes;
    make_bf16_in_12_tiles<<<blocks_for(chunks, 1), kPackThreads, 0, stream>>>(codes, n, k, to, chunks,
                                                                              does_not_fit);
  } else {
    return make_4bit_tiles(kind, static_cast<const uint8_t*>(m.codes), static_cast<const uint8_t*>(m.scales),
                           n, k, to, stream);
  }
  return cudaGetLastError();
}

}  // namespace nibble::cuda
