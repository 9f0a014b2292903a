// A weight matrix [N, K] in one of the formats that we compute with: what the loader makes of the tensors on
// disk and what a backend takes. Plain data; does not own its bytes. Rows follow each other without gaps, so
// one expert of a stacked tensor is a Matrix that starts in the middle of it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "quant/dtype.h"
#include "quant/gguf_blocks.h"

namespace nibble {

enum class MatrixFormat {
  kF32,        // codes: float [N, K]
  kF16,        // codes: u16 [N, K]
  kBF16,       // codes: u16 [N, K]
  kNvfp4,      // codes: u8 [N, K/2], scales: e4m3 [N, K/16], tensor_scale; see nvfp4.h
  kMxfp4,      // codes: u8 [N, K/2], scales: e8m0 [N, K/32]; see mxfp4.h
  kQ4,         // codes: u8 [N, K/2], two's complement nibbles, scales: f16 [N, K/32]; see q4.h
  kF8E4M3,     // codes: e4m3 [N, K], tensor_scale
  kFp8Block,   // codes: e4m3 [N, K], scales: float [ceil(N/128), ceil(K/128)], row 0 the first of a block
  kGgufQ4_0,   // GGUF: rows of blocks that hold their own scales; see gguf_blocks.h
  kGgufQ4_1,   //
  kGgufQ8_0,   //
  kGgufQ4K,    //
  kGgufQ6K,    //
  kGgufMxfp4,  //
  kGgufNvfp4,  // the tensor `<base>.scale` is tensor_scale
};

// What a format is made of: the one table of them is in matrix.cc.
struct MatrixFormatInfo {
  MatrixFormat format;
  std::string_view name;
  int64_t group;          // columns of the smallest unit of codes; K is a multiple of it
  int64_t group_bytes;    // codes of one group of a row
  int64_t scale_columns;  // columns that share a block scale; K need not be a multiple of it
  int64_t scale_bytes;    // of one block scale; 0: none
  int64_t scale_rows;     // rows that share their block scales
  // The first `count` values at `codes` and `scales` (both at the start of a group and of a block scale), as
  // code * block scale in float32, without the tensor scale. REQUIRES count a multiple of `group`.
  void (*decode)(const void* codes, const void* scales, int64_t count, float* out);

  int64_t code_row_bytes(int64_t k) const { return k / group * group_bytes; }
  int64_t scale_row_bytes(int64_t k) const { return (k + scale_columns - 1) / scale_columns * scale_bytes; }
};

const MatrixFormatInfo& matrix_format_info(MatrixFormat format);
std::span<const MatrixFormatInfo> matrix_formats();  // all of them
std::string_view matrix_format_name(MatrixFormat format);
// Of a matrix of plain F32, F16 or BF16 numbers; nothing for other dtypes.
std::optional<MatrixFormat> plain_matrix_format(DType dtype);
MatrixFormat gguf_matrix_format(GgufType type);
// Bytes of the codes, of the scales, and of both, of an [N, K] matrix. REQUIRES K a multiple of the format's
// group.
int64_t matrix_code_bytes(MatrixFormat format, int64_t n, int64_t k);
int64_t matrix_scale_bytes(MatrixFormat format, int64_t n, int64_t k);
int64_t matrix_bytes(MatrixFormat format, int64_t n, int64_t k);

struct Matrix {
  MatrixFormat format = MatrixFormat::kF32;
  int64_t n = 0;  // output rows
  int64_t k = 0;  // input columns
  const void* codes = nullptr;
  const void* scales = nullptr;  // block scales; null where the format has none
  // Value = code * block scale * tensor_scale, with tensor_scale applied to the float32 accumulator, never
  // folded into block scales (folding costs 2.68% mean error, 18.75% at worst; spec formats.md 1).
  float tensor_scale = 1.0f;
  // The second-level scale that calibration gave the rows that go in (NVFP4), as the file says it; 0: none.
  float input_scale = 0.0f;

  // The codes are in an order of the backend that holds them, which alone can read them.
  bool tiled = false;
  // Tiled BF16 weights, of 12 bits each, without loss.
  bool in_12_bits = false;

  bool empty() const { return codes == nullptr; }
};

// Row n as float32, tensor_scale included: the judge of every kernel. out has k elements.
void dequantize_row(const Matrix& matrix, int64_t n, float* out);

}  // namespace nibble
