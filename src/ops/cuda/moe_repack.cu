#include <algorithm>

#include "ops/cuda/moe_decode.h"
#include "ops/cuda/moe_tiles.h"

namespace nibble::cuda {
namespace {

// One thread a word of codes: word j of lane (g, q), half h, tile, chunk, pair of tiles.
__global__ void repack_codes(TileKind kind, DiskMatrix first, DiskMatrix second, bool down, int n, int k,
                             uint8_t* to, int64_t words) {
  const int chunks = (k + 127) / 128;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < words;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int j = id % 4, lane = id / 4 % 32, half = id / 128 % 2, tile = id / 256 % 2;
    const int chunk = id / 512 % chunks;
    const int64_t pair = id / 512 / chunks;
    const DiskMatrix& m = !down && tile == 1 ? second : first;
    const int64_t row = (down ? pair * 32 + tile * 16 : pair * 16) + half * 8 + lane / 4;
    const int column = chunk * 128 + word_column(kind, lane % 4, j);
    uint32_t codes = 0;
    if (row < n && column < k) {
      const uint8_t* from = m.codes + row * (k / 2) + column / 2;
      for (int b = 0; b < 4; ++b) codes |= static_cast<uint32_t>(from[b]) << (8 * b);
      if (kind == TileKind::kNvfp4) {
        const uint8_t scale = m.scales[row * (k / 16) + column / 16];
        if ((scale & 0x80) != 0) codes ^= 0x88888888u;
        if ((scale & 0x7F) == 0) codes = 0;
      }
    }
    uint8_t* chunk_at = to + (pair * chunks + chunk) * chunk_bytes(kind);
    reinterpret_cast<uint32_t*>(chunk_at + tile * kTileCodeBytes + half * 512 + lane * 16)[j] =
        kind == TileKind::kQ4 ? place_q4_codes(codes) : place_codes(codes);
  }
}

// One thread a lane's scales of one tile and chunk: of q4 a block's, of the others those of its columns.
__global__ void repack_scales(TileKind kind, DiskMatrix first, DiskMatrix second, bool down, int n, int k,
                              uint8_t* to, int64_t lanes) {
  const int chunks = (k + 127) / 128, block = block_columns(kind), each = 32 / block;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < lanes;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int lane = id % 32, tile = id / 32 % 2, chunk = id / 64 % chunks;
    const int64_t pair = id / 64 / chunks;
    const DiskMatrix& m = !down && tile == 1 ? second : first;
    uint8_t* at = to + (pair * chunks + chunk) * chunk_bytes(kind) + 2 * kTileCodeBytes +
                  tile * tile_scale_bytes(kind) + lane * 2 * each * block_scale_bytes(kind);
    for (int half = 0; half < 2; ++half) {
      const int64_t row = (down ? pair * 32 + tile * 16 : pair * 16) + half * 8 + lane / 4;
      for (int b = 0; b < each; ++b) {
        const int column = chunk * 128 + lane % 4 * 32 + b * block;
        const bool is_there = row < n && column < k;
        const int64_t from = row * (k / block) + column / block;
        if (kind == TileKind::kQ4) {
          reinterpret_cast<uint16_t*>(at)[half] =
              is_there ? reinterpret_cast<const uint16_t*>(m.scales)[from] : uint16_t{0};
          continue;
        }
        const uint8_t scale = is_there ? m.scales[from] : uint8_t{0};
        at[half * each + b] = kind == TileKind::kNvfp4 ? place_scale(scale) : scale;
      }
    }
  }
}

// One thread a lane's operands of one step.
__global__ void repack_bf16(DiskMatrix first, DiskMatrix second, bool down, int n, int k, uint8_t* to,
                            int64_t operands) {
  const int chunks = (k + 127) / 128;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < operands;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int lane = id % 32, step = id / 32 % 8, tile = id / 256 % 2, chunk = id / 512 % chunks;
    const int64_t pair = id / 512 / chunks;
    const DiskMatrix& m = !down && tile == 1 ? second : first;
    uint32_t words[4] = {};
    for (int i = 0; i < 8; ++i) {
      const int64_t row = (down ? pair * 32 + tile * 16 : pair * 16) + i / 2 % 2 * 8 + lane / 4;
      const int column =
          chunk * 128 + word_column(TileKind::kBF16, lane % 4, step / 2) + step % 2 * 4 + i / 4 * 2 + i % 2;
      if (row < n && column < k) {
        const uint32_t bits = reinterpret_cast<const uint16_t*>(m.codes)[row * k + column];
        words[i / 2] |= bits << (16 * (i % 2));
      }
    }
    reinterpret_cast<uint4*>(to)[id] = {words[0], words[1], words[2], words[3]};
  }
}

cudaError_t repack(TileKind kind, DiskMatrix first, DiskMatrix second, bool down, int n, int k, uint8_t* to,
                   cudaStream_t stream) {
  const int rows = down ? 32 : 16;
  const int64_t chunks = static_cast<int64_t>((n + rows - 1) / rows) * ((k + 127) / 128);
  auto grid = [](int64_t work) {
    return static_cast<unsigned>(std::min<int64_t>((work + 255) / 256, 65535));
  };
  if (kind == TileKind::kBF16) {
    repack_bf16<<<grid(chunks * 512), 256, 0, stream>>>(first, second, down, n, k, to, chunks * 512);
    return cudaGetLastError();
  }
  repack_codes<<<grid(chunks * 512), 256, 0, stream>>>(kind, first, second, down, n, k, to, chunks * 512);
  repack_scales<<<grid(chunks * 64), 256, 0, stream>>>(kind, first, second, down, n, k, to, chunks * 64);
  return cudaGetLastError();
}

}  // namespace

int64_t MoeShape::gate_up_bytes() const {
  return static_cast<int64_t>(width_chunks()) * 8 * model_chunks() * chunk_bytes(kind);
}
int64_t MoeShape::down_bytes() const {
  return static_cast<int64_t>(model_chunks()) * 4 * width_chunks() * chunk_bytes(kind);
}

cudaError_t repack_gate_up(const MoeShape& shape, DiskMatrix gate, DiskMatrix up, uint8_t* to,
                           cudaStream_t stream) {
  return repack(shape.kind, gate, up, false, shape.width, shape.model, to, stream);
}

cudaError_t make_4bit_tiles(TileKind kind, const uint8_t* codes, const uint8_t* scales, int n, int k,
                            uint8_t* to, cudaStream_t stream) {
  return repack(kind, {codes, scales}, {codes, scales}, true, n, k, to, stream);
}

cudaError_t repack_down(const MoeShape& shape, DiskMatrix down, uint8_t* to, cudaStream_t stream) {
  return repack(shape.kind, down, down, true, shape.model, shape.width, to, stream);
}

}  // namespace nibble::cuda
