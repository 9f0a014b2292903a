// The order in which the cpu's kernels read 4-bit weights: tiles of 16 rows, each one stream of bytes.
//
// A tile is its groups of 128 columns one after the other (the last may have fewer blocks). A group is the
// scales of its blocks, then their codes; a block is the columns that share a scale.
//   scales  of a block: 16, row after row; e4m3 without signs (a negative scale's sign is on its codes), e8m0
//           or float16
//   codes   of 16 columns: the first four bytes (8 columns) of row 0, of row 1, ... of row 15, then the next
//           four of each
// As many bytes as before, where the number of rows is a multiple of 16; rows that are not there are zeros.
#pragma once

#include <cstdint>
#include <optional>

#include "quant/matrix.h"

namespace nibble::cpu {

// The format of the tiles that hold a matrix's weights, exactly; nothing where its weights cannot be tiles.
// GGUF's NVFP4, MXFP4 and Q4_0 are NVFP4, MXFP4 and q4 there.
std::optional<MatrixFormat> tile_format(MatrixFormat format);
// Whether a matrix's weights can be tiles: a scale of MXFP4 may be too large (tiles.inc.h).
bool can_be_tiles(const Matrix& matrix);
// Of a format of tiles.
int64_t tile_bytes(MatrixFormat format, int64_t n, int64_t k);
// Writes the tiles [first, last) of `matrix`, to their places in `tiles`. REQUIRES can_be_tiles().
void make_tiles(const Matrix& matrix, int64_t first, int64_t last, uint8_t* tiles);

}  // namespace nibble::cpu
