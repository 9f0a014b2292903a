#include <algorithm>

#include "ops/cuda/moe_decode.h"
#include "ops/cuda/moe_tiles.h"

namespace nibble::cuda {
namespace {

// One thread a word of codes: word j of lane (g, q), half h, tile, chunk, pair of tiles.
__global__ void repack_codes(DiskMatrix first, DiskMatrix second, bool down, int n, int k, int block,
                             uint8_t* to, int64_t words) {
  const int chunks = (k + 127) / 128;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < words;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int j = id % 4, lane = id / 4 % 32, half = id / 128 % 2, tile = id / 256 % 2;
    const int chunk = id / 512 % chunks;
    const int64_t pair = id / 512 / chunks;
    const DiskMatrix& m = !down && tile == 1 ? second : first;
    const int64_t row = (down ? pair * 32 + tile * 16 : pair * 16) + half * 8 + lane / 4;
    const int column = chunk * 128 + lane % 4 * 32 + j * 8;
    uint32_t codes = 0;
    if (row < n && column < k) {
      const uint8_t* from = m.codes + row * (k / 2) + column / 2;
      for (int b = 0; b < 4; ++b) codes |= static_cast<uint32_t>(from[b]) << (8 * b);
      if (block == 16) {
        const uint8_t scale = m.scales[row * (k / 16) + column / 16];
        if ((scale & 0x80) != 0) codes ^= 0x88888888u;
        if ((scale & 0x7F) == 0) codes = 0;
      }
    }
    uint8_t* chunk_at = to + (pair * chunks + chunk) * chunk_bytes(block);
    reinterpret_cast<uint32_t*>(chunk_at + tile * kTileCodeBytes + half * 512 + lane * 16)[j] =
        place_codes(codes);
  }
}

// One thread a lane's scales of one tile and chunk.
__global__ void repack_scales(DiskMatrix first, DiskMatrix second, bool down, int n, int k, int block,
                              uint8_t* to, int64_t lanes) {
  const int chunks = (k + 127) / 128, each = 32 / block;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < lanes;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int lane = id % 32, tile = id / 32 % 2, chunk = id / 64 % chunks;
    const int64_t pair = id / 64 / chunks;
    const DiskMatrix& m = !down && tile == 1 ? second : first;
    uint8_t* at = to + (pair * chunks + chunk) * chunk_bytes(block) + 2 * kTileCodeBytes +
                  tile * tile_scale_bytes(block) + lane * 2 * each;
    for (int half = 0; half < 2; ++half) {
      const int64_t row = (down ? pair * 32 + tile * 16 : pair * 16) + half * 8 + lane / 4;
      for (int b = 0; b < each; ++b) {
        const int column = chunk * 128 + lane % 4 * 32 + b * block;
        uint8_t scale = 0;
        if (row < n && column < k) scale = m.scales[row * (k / block) + column / block];
        at[half * each + b] = block == 16 ? place_scale(scale) : scale;
      }
    }
  }
}

cudaError_t repack(DiskMatrix first, DiskMatrix second, bool down, int n, int k, int block, uint8_t* to,
                   cudaStream_t stream) {
  const int rows = down ? 32 : 16;
  const int64_t chunks = static_cast<int64_t>((n + rows - 1) / rows) * ((k + 127) / 128);
  auto grid = [](int64_t work) {
    return static_cast<unsigned>(std::min<int64_t>((work + 255) / 256, 65535));
  };
  repack_codes<<<grid(chunks * 512), 256, 0, stream>>>(first, second, down, n, k, block, to, chunks * 512);
  repack_scales<<<grid(chunks * 64), 256, 0, stream>>>(first, second, down, n, k, block, to, chunks * 64);
  return cudaGetLastError();
}

}  // namespace

int64_t MoeShape::gate_up_bytes() const {
  return static_cast<int64_t>(width_chunks()) * 8 * model_chunks() * chunk_bytes(block);
}
int64_t MoeShape::down_bytes() const {
  return static_cast<int64_t>(model_chunks()) * 4 * width_chunks() * chunk_bytes(block);
}

cudaError_t repack_gate_up(const MoeShape& shape, DiskMatrix gate, DiskMatrix up, uint8_t* to,
                           cudaStream_t stream) {
  return repack(gate, up, false, shape.width, shape.model, shape.block, to, stream);
}

cudaError_t make_4bit_tiles(const uint8_t* codes, const uint8_t* scales, int n, int k, int block, uint8_t* to,
                            cudaStream_t stream) {
  return repack({codes, scales}, {codes, scales}, true, n, k, block, to, stream);
}

cudaError_t repack_down(const MoeShape& shape, DiskMatrix down, uint8_t* to, cudaStream_t stream) {
  return repack(down, down, true, shape.model, shape.width, shape.block, to, stream);
}

}  // namespace nibble::cuda
