// The two kernels behind tile_linear(), each for any number of rows (but that of few prepares one at most);
// they give the same bits.
#pragma once

#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {

// Up to here tile_linear_few is faster.
constexpr int64_t few_rows(TileKind kind) { return is_bf16(kind) ? 8 : 4; }

// mma.sync, any device; without a workspace.
cudaError_t tile_linear_few(TileKind kind, const TileLinear& args, cudaStream_t stream);

// wgmma, code for sm_90a.
int64_t tile_gemm_workspace_bytes(int64_t rows, int64_t k);
cudaError_t tile_gemm(TileKind kind, const TileLinear& args, cudaStream_t stream);

}  // namespace nibble::cuda
