#include "ops/cpu/weight_tiles.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"
#include "ops/cpu/kernels.h"
#include "quant/split_format.h"

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

// The tile of at most 16 rows in the layout of `format`.
void put_tile(MatrixFormat format, const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t k,
              uint8_t* to) {
  const MatrixFormatInfo& info = matrix_format_info(format);
  const int64_t columns = info.scale_columns, scale_bytes = info.scale_bytes;
  const int64_t code_row = info.code_row_bytes(k), scale_row = info.scale_row_bytes(k);
  const int64_t blocks = k / columns, group_blocks = kPackedColumns / columns;
  const int64_t block_bytes = kTileWeightRows * (columns / 2 + scale_bytes);
  if (rows < kTileWeightRows) std::memset(to, 0, static_cast<size_t>(blocks * block_bytes));
  for (int64_t begin = 0; begin < blocks; begin += group_blocks) {
    const int64_t count = std::min(group_blocks, blocks - begin);
    uint8_t* group_codes = to + count * kTileWeightRows * scale_bytes;
    for (int64_t lane = 0; lane < rows; ++lane) {
      for (int64_t b = 0; b < count; ++b) {
        const uint8_t* scale = scales + lane * scale_row + (begin + b) * scale_bytes;
        uint8_t* scale_to = to + (b * kTileWeightRows + lane) * scale_bytes;
        std::memcpy(scale_to, scale, static_cast<size_t>(scale_bytes));
        const bool negative = format == MatrixFormat::kNvfp4 && (*scale & 0x80) != 0;
        if (negative) *scale_to &= 0x7F;
        put_codes(codes + lane * code_row + (begin + b) * columns / 2, columns, negative, lane,
                  group_codes + b * kTileWeightRows * columns / 2);
      }
    }
    to += count * block_bytes;
  }
}

// One row of GGUF blocks in the layout of its tile_format.
void repack_row(MatrixFormat format, const uint8_t* blocks, int64_t k, uint8_t* codes, uint8_t* scales) {
  switch (format) {
    case MatrixFormat::kGgufNvfp4:
      repack_gguf_nvfp4_row(blocks, k, codes, scales);  // 480 as 0x7F is what tiles mean by it
      return;
    case MatrixFormat::kGgufMxfp4:
      return repack_gguf_mxfp4_row(blocks, k, codes, scales);
    case MatrixFormat::kGgufQ4_0:
      return repack_gguf_q4_0_row(blocks, k, codes, scales);
    default:
      NIBBLE_CHECK(false);
  }
}

}  // namespace

std::optional<MatrixFormat> tile_format(MatrixFormat format) {
  using enum MatrixFormat;
  const MatrixFormat split = split_format(format);
  if (split == kNvfp4 || split == kMxfp4 || split == kQ4) return split;
  return std::nullopt;
}

bool can_be_tiles(const Matrix& matrix) {
  constexpr uint8_t kMost = 127 + 118;
  const std::optional<MatrixFormat> format = tile_format(matrix.format);
  if (format != MatrixFormat::kMxfp4) return format.has_value();
  return mxfp4_scale_range(matrix).most <= kMost;
}

int64_t tile_bytes(MatrixFormat format, int64_t n, int64_t k) {
  return matrix_bytes(format, round_up(n, kTileWeightRows), k);
}

void make_tiles(const Matrix& matrix, int64_t first, int64_t last, uint8_t* tiles) {
  const MatrixFormat format = tile_format(matrix.format).value();
  const MatrixFormatInfo &to = matrix_format_info(format), &from = matrix_format_info(matrix.format);
  const int64_t k = matrix.k, code_row = to.code_row_bytes(k), scale_row = to.scale_row_bytes(k);
  const bool is_gguf = format != matrix.format;
  std::vector<uint8_t> repacked(is_gguf ? static_cast<size_t>(kTileWeightRows * (code_row + scale_row)) : 0);
  for (int64_t tile = first; tile < last; ++tile) {
    const int64_t n = tile * kTileWeightRows, rows = std::min(kTileWeightRows, matrix.n - n);
    const uint8_t* codes = static_cast<const uint8_t*>(matrix.codes) + n * from.code_row_bytes(k);
    const uint8_t* scales = nullptr;
    if (is_gguf) {
      uint8_t* row_scales = repacked.data() + kTileWeightRows * code_row;
      for (int64_t row = 0; row < rows; ++row) {
        repack_row(matrix.format, codes + row * from.code_row_bytes(k), k, repacked.data() + row * code_row,
                   row_scales + row * scale_row);
      }
      codes = repacked.data();
      scales = row_scales;
    } else {
      scales = static_cast<const uint8_t*>(matrix.scales) + n * scale_row;
    }
    put_tile(format, codes, scales, rows, k, tiles + tile_bytes(format, n, k));
  }
}

}  // namespace nibble::cpu
