// Products of rows with weights in BF16, NVFP4, MXFP4 or q4 on the tensor cores. The weights lie in memory
// once, in an order of their own (moe_tiles.h, linear_tiles.cuh), for the kernel of few rows, which is bound
// by their bytes, and for that of many (tile_gemm.h). A row of x goes in as the sum of two bfloat16 numbers;
// the order of every sum is that of linear_tiles.cuh, for any number of rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/activation.h"
#include "ops/cuda/moe_tiles.h"
#include "quant/matrix.h"

namespace nibble::cuda {

// Shared memory of a block that these kernels are laid out for: what Hopper has. Not every device does.
inline constexpr int kMaxSharedBytes = 227 << 10;

// Of a matrix as it is, or is to be, in tiles; REQUIRES a format that has_tiles().
TileKind tile_kind(const Matrix& matrix);

// Whether matrices of this format can be brought into tiles; GGUF blocks by way of gguf_split.h.
bool has_tiles(MatrixFormat format);
int64_t tile_bytes(TileKind kind, int64_t n, int64_t k);

// Writes the tiles of `matrix`, whose codes and scales are the disk's, in device memory. Codes of a block
// with a zero scale become zero; e8m0 scales are as why_not_tiles() (moe_formats.h) wants them. kBF16In12:
// *does_not_fit becomes 1 where some weights cannot be in that form, and then the tiles are none.
cudaError_t make_tiles(TileKind kind, const Matrix& matrix, uint8_t* to, int* does_not_fit,
                       cudaStream_t stream);

struct TileProduct {
  const uint8_t* tiles = nullptr;
  const float* bias = nullptr;  // [n]; null: none
  float* out = nullptr;         // [rows, n]; written, or where `adds`, added to
  bool adds = false;
  int64_t out_stride = 0;
  int64_t n = 0;
  float scale = 1;
};

inline constexpr int kMaxTileProducts = 8;

enum class Prepare { kNothing, kNorm, kGlu };

// Several matrices of one kind and k times the same rows.
struct TileLinear {
  TileProduct products[kMaxTileProducts];
  int count = 0;
  const float* x = nullptr;  // [rows, k]
  int64_t x_stride = 0;
  int64_t rows = 0, k = 0;
  void* workspace = nullptr;  // tile_linear_workspace_bytes()
  // What x goes through on its way; REQUIRES can_prepare().
  Prepare prepare = Prepare::kNothing;
  // kNorm: rms_norm, which is also written to `normed`.
  const float* norm = nullptr;  // [k]
  float eps = 0;
  float* normed = nullptr;  // [rows, k]
  int64_t normed_stride = 0;
  // kGlu: activation(x, up).
  ActivationSpec activation;
  const float* up = nullptr;  // [rows, k]
  int64_t up_stride = 0;
};
// Whether this build and device have kernels on wgmma (code for sm_90a).
bool has_wgmma();
// One row, which every multiprocessor then prepares for itself; or rows that go through a kernel of their own
// on their way anyway.
bool can_prepare(TileKind kind, int64_t rows, int64_t k);
// For few rows none: then every warp splits what it reads of x in two; for more a kernel does it once.
int64_t tile_linear_workspace_bytes(TileKind kind, int64_t rows, int64_t k);
cudaError_t tile_linear(TileKind kind, const TileLinear& args, cudaStream_t stream);

}  // namespace nibble::cuda
