#include "ops/cpu/weight_tiles.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/numbers.h"
#include "ops/cpu/kernels.h"

namespace nibble::cpu {
namespace {

constexpr uint32_t kEverySign = 0x88888888u;  // of 8 e2m1 codes

// One row of a block. Where `negative`, the codes change their signs.
void put_codes(const uint8_t* row, int64_t block_columns, bool negative, int64_t lane, uint8_t* block) {
  for (int64_t at = 0; at < block_columns / 2; at += 4) {
    uint32_t codes = 0;
    std::memcpy(&codes, row + at, sizeof(codes));
    if (negative) codes ^= kEverySign;
    std::memcpy(block + at * kTileWeightRows + lane * 4, &codes, sizeof(codes));
  }
}

}  // namespace

bool can_be_tiles(MatrixFormat format) {
  using enum MatrixFormat;
  return format == kNvfp4 || format == kMxfp4 || format == kQ4;
}

int64_t tile_bytes(MatrixFormat format, int64_t n, int64_t k) {
  return matrix_bytes(format, round_up(n, kTileWeightRows), k);
}

void make_tiles(const Matrix& matrix, int64_t first, int64_t last, uint8_t* tiles) {
  NIBBLE_CHECK(can_be_tiles(matrix.format));
  const MatrixFormatInfo& info = matrix_format_info(matrix.format);
  const bool has_signs = matrix.format == MatrixFormat::kNvfp4;
  const int64_t columns = info.scale_columns, scale_bytes = info.scale_bytes;
  const int64_t blocks = matrix.k / columns, group_blocks = kPackedColumns / columns;
  const int64_t code_row = info.code_row_bytes(matrix.k), scale_row = info.scale_row_bytes(matrix.k);
  const int64_t block_bytes = kTileWeightRows * (columns / 2 + scale_bytes);
  const auto* codes = static_cast<const uint8_t*>(matrix.codes);
  const auto* scales = static_cast<const uint8_t*>(matrix.scales);
  for (int64_t tile = first; tile < last; ++tile) {
    uint8_t* to = tiles + tile * blocks * block_bytes;
    const int64_t rows = std::min(kTileWeightRows, matrix.n - tile * kTileWeightRows);
    if (rows < kTileWeightRows) std::memset(to, 0, static_cast<size_t>(blocks * block_bytes));
    for (int64_t begin = 0; begin < blocks; begin += group_blocks) {
      const int64_t count = std::min(group_blocks, blocks - begin);
      uint8_t* group_codes = to + count * kTileWeightRows * scale_bytes;
      for (int64_t lane = 0; lane < rows; ++lane) {
        const int64_t n = tile * kTileWeightRows + lane;
        for (int64_t b = 0; b < count; ++b) {
          const uint8_t* scale = scales + n * scale_row + (begin + b) * scale_bytes;
          uint8_t* scale_to = to + (b * kTileWeightRows + lane) * scale_bytes;
          std::memcpy(scale_to, scale, static_cast<size_t>(scale_bytes));
          const bool negative = has_signs && (*scale & 0x80) != 0;
          if (negative) *scale_to &= 0x7F;
          put_codes(codes + n * code_row + (begin + b) * columns / 2, columns, negative, lane,
                    group_codes + b * kTileWeightRows * columns / 2);
        }
      }
      to += count * block_bytes;
    }
  }
}

}  // namespace nibble::cpu
