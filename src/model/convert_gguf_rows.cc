#include "model/convert_gguf_rows.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>

#include "quant/float_codes.h"
#include "quant/gguf_blocks.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"

namespace nibble {
namespace {

const uint8_t* row_codes(const Matrix& matrix, int64_t row) {
  return static_cast<const uint8_t*>(matrix.codes) +
         row * matrix_format_info(matrix.format).code_row_bytes(matrix.k);
}

// Calls body(first_row, rows) for a few megabytes of output at a time.
template <class Body>
Status for_rows(const Matrix& matrix, const ReadBytes& read, const Body& body) {
  constexpr int64_t kChunkValues = 1 << 20;
  const int64_t chunk = std::clamp(kChunkValues / matrix.k, int64_t{1}, matrix.n);
  for (int64_t row = 0; row < matrix.n; row += chunk) {
    const int64_t rows = std::min(chunk, matrix.n - row);
    NIBBLE_RETURN_IF_ERROR(body(row, rows));
    read(matrix_code_bytes(matrix.format, rows, matrix.k));
  }
  return {};
}

std::span<const std::byte> bytes_of(const auto& values, int64_t count) {
  return std::as_bytes(std::span(values).first(static_cast<size_t>(count)));
}

// Codes and block scales of a 4-bit matrix, row by row, to outputs 0 and 1. encode(row, codes, scales).
template <class Encode>
Status write_4bit(const Matrix& matrix, int64_t group, const WriteTensor& write, const ReadBytes& read,
                  const Encode& encode) {
  const int64_t code_bytes = matrix.k / 2, scale_bytes = matrix.k / group;
  std::vector<uint8_t> codes, scales;
  return for_rows(matrix, read, [&](int64_t first, int64_t rows) -> Status {
    codes.resize(static_cast<size_t>(rows * code_bytes));
    scales.resize(static_cast<size_t>(rows * scale_bytes));
    for (int64_t r = 0; r < rows; ++r)
      NIBBLE_RETURN_IF_ERROR(
          encode(first + r, codes.data() + r * code_bytes, scales.data() + r * scale_bytes));
    NIBBLE_RETURN_IF_ERROR(write(0, first * code_bytes, bytes_of(codes, rows * code_bytes)));
    return write(1, first * scale_bytes, bytes_of(scales, rows * scale_bytes));
  });
}

Status write_scale(size_t output, float scale, const WriteTensor& write) {
  return write(output, 0, std::as_bytes(std::span(&scale, 1)));
}

}  // namespace

int64_t gguf_file_row(int64_t row, int64_t head_dim) {
  if (head_dim == 0) return row;
  const int64_t i = row % head_dim, half = head_dim / 2;
  return row - i + (i < half ? 2 * i : 2 * (i - half) + 1);
}

Status write_rows(const Matrix& matrix, int64_t head_dim, const WriteTensor& write, const ReadBytes& read) {
  const int64_t row_bytes = matrix_format_info(matrix.format).code_row_bytes(matrix.k);
  std::vector<std::byte> out;
  return for_rows(matrix, read, [&](int64_t first, int64_t rows) {
    out.resize(static_cast<size_t>(rows * row_bytes));
    for (int64_t r = 0; r < rows; ++r) {
      const auto* row =
          reinterpret_cast<const std::byte*>(row_codes(matrix, gguf_file_row(first + r, head_dim)));
      std::copy_n(row, row_bytes, out.begin() + r * row_bytes);
    }
    return write(0, first * row_bytes, out);
  });
}

Status write_bf16_rows(const Matrix& matrix, int64_t head_dim, const WriteTensor& write,
                       const ReadBytes& read) {
  std::vector<float> row(static_cast<size_t>(matrix.k));
  std::vector<uint16_t> out;
  return for_rows(matrix, read, [&](int64_t first, int64_t rows) {
    out.clear();
    for (int64_t r = 0; r < rows; ++r) {
      dequantize_row(matrix, gguf_file_row(first + r, head_dim), row.data());
      std::transform(row.begin(), row.end(), std::back_inserter(out), float_to_bf16);
    }
    return write(0, first * matrix.k * 2, bytes_of(out, rows * matrix.k));
  });
}

Status write_nvfp4(const Matrix& matrix, int64_t head_dim, const std::string& file, const std::string& tensor,
                   const WriteTensor& write, const ReadBytes& read) {
  NIBBLE_RETURN_IF_ERROR(write_scale(2, matrix.tensor_scale, write));
  if (matrix.input_scale > 0) NIBBLE_RETURN_IF_ERROR(write_scale(3, matrix.input_scale, write));
  return write_4bit(
      matrix, nvfp4::kGroup, write, read, [&](int64_t row, uint8_t* codes, uint8_t* scales) -> Status {
        const uint8_t* blocks = row_codes(matrix, gguf_file_row(row, head_dim));
        if (repack_gguf_nvfp4_row(blocks, matrix.k, codes, scales)) return {};
        return user_error("{}: '{}', row {}: a block scale of 0xff has no code in NVFP4", file, tensor, row);
      });
}

Status quantize_to_nvfp4(const Matrix& matrix, int64_t head_dim, const WriteTensor& write,
                         const ReadBytes& read) {
  std::vector<float> row(static_cast<size_t>(matrix.k));
  float amax = 0;
  for (int64_t n = 0; n < matrix.n; ++n) {
    dequantize_row(matrix, n, row.data());
    for (float value : row) amax = std::max(amax, std::fabs(value));
  }
  const float scale = nvfp4::choose_tensor_scale(amax);
  NIBBLE_RETURN_IF_ERROR(write_scale(2, scale, write));
  return write_4bit(matrix, nvfp4::kGroup, write, read,
                    [&](int64_t n, uint8_t* codes, uint8_t* scales) -> Status {
                      dequantize_row(matrix, gguf_file_row(n, head_dim), row.data());
                      nvfp4::quantize_row(row.data(), matrix.k, scale, codes, scales);
                      return {};
                    });
}

Status write_mxfp4(const Matrix& matrix, int64_t head_dim, const WriteTensor& write, const ReadBytes& read) {
  return write_4bit(
      matrix, mxfp4::kGroup, write, read, [&](int64_t row, uint8_t* codes, uint8_t* scales) -> Status {
        repack_gguf_mxfp4_row(row_codes(matrix, gguf_file_row(row, head_dim)), matrix.k, codes, scales);
        return {};
      });
}

Status write_mxfp4_expert(const std::vector<Matrix>& parts, int64_t expert, const WriteTensor& write,
                          const ReadBytes& read) {
  const Matrix& first = parts.front();
  const int64_t halves = std::ssize(parts), rows = first.n * halves;
  const int64_t code_bytes = first.k / 2, scale_bytes = first.k / mxfp4::kGroup;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * code_bytes)),
      scales(static_cast<size_t>(rows * scale_bytes));
  for (int64_t row = 0; row < rows; ++row) {
    const Matrix& part = parts[static_cast<size_t>(row % halves)];
    repack_gguf_mxfp4_row(row_codes(part, row / halves), part.k, codes.data() + row * code_bytes,
                          scales.data() + row * scale_bytes);
  }
  NIBBLE_RETURN_IF_ERROR(write(0, expert * rows * code_bytes, std::as_bytes(std::span(codes))));
  read(matrix_bytes(first.format, first.n, first.k) * halves);
  return write(1, expert * rows * scale_bytes, std::as_bytes(std::span(scales)));
}

Status write_transposed_expert(const std::vector<Matrix>& parts, int64_t expert, const WriteTensor& write,
                               const ReadBytes& read) {
  const int64_t halves = std::ssize(parts), n = parts.front().n, k = parts.front().k;
  const int64_t columns = n * halves;
  std::vector<uint16_t> out(static_cast<size_t>(k * columns));
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t column = 0; column < columns; ++column) {
    const Matrix& part = parts[static_cast<size_t>(column % halves)];
    dequantize_row(part, column / halves, row.data());
    for (int64_t i = 0; i < k; ++i)
      out[static_cast<size_t>(i * columns + column)] = float_to_bf16(row[static_cast<size_t>(i)]);
  }
  for (const Matrix& part : parts) read(matrix_bytes(part.format, n, k));
  return write(0, expert * k * columns * 2, std::as_bytes(std::span(out)));
}

}  // namespace nibble
