// GGUF's blocks of the numbers of NVFP4, MXFP4 and q4, on their way into tiles: codes and scales apart.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/moe_tiles.h"
#include "quant/split_format.h"

namespace nibble::cuda {

constexpr bool can_split(MatrixFormat format) { return split_format(format) != format; }

// A block is its scales, then for each of them the codes of its columns, of which byte j holds the column j
// and, high, j + half.
struct GgufBlocks {
  explicit GgufBlocks(const Matrix& m);

  // Byte i of the split matrix: of its codes, then of its scales.
  NIBBLE_HOST_DEVICE uint8_t split_byte(int64_t i) const {
    const int64_t head = scales * scale_bytes, block_bytes = head + scales * half;
    if (i >= code_bytes) {
      i -= code_bytes;
      const int byte = blocks[i / head * block_bytes + i % head];
      if (format != MatrixFormat::kNvfp4) return static_cast<uint8_t>(byte);
      // No sign; 0x7F is 0, and 0xFF 480, which is what place_scale() makes of 0x7F.
      return static_cast<uint8_t>(byte == 0x7F ? 0 : byte & 0x7F);
    }
    const int64_t scale = i / half, column = i % half * 2;
    const uint8_t* at = blocks + scale / scales * block_bytes + head + scale % scales * half + column % half;
    const int shift = column < half ? 0 : 4, codes = (at[0] >> shift & 15) | (at[1] >> shift & 15) << 4;
    // Q4_0's are the value + 8, q4's two's complement.
    return static_cast<uint8_t>(format == MatrixFormat::kQ4 ? codes ^ 0x88 : codes);
  }

  const uint8_t* blocks;
  MatrixFormat format;        // behind the split
  int64_t code_bytes, bytes;  // of the matrix, in either form
  int64_t scales, scale_bytes, half;
};

// Splits a matrix in device memory that can_split(); its bytes are then at `to`, as many as before.
cudaError_t split_gguf(Matrix& matrix, uint8_t* to, cudaStream_t stream);

}  // namespace nibble::cuda
