#include "checkpoint/quantize_tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "quant/float_codes.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"
#include "quant/q4.h"

namespace nibble {
namespace {

constexpr int64_t kChunkBytes = 4 << 20;  // of the source: large enough for a disk, small enough for a cache

// Row-major values [rows, columns] of a dtype that is BF16, F16 or F32, read as they lie.
void to_floats(DType dtype, const std::byte* bytes, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, bytes, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t code = 0;
    std::memcpy(&code, bytes + 2 * i, 2);
    out[i] = dtype == DType::kBF16 ? bf16_to_float(code) : f16_to_float(code);
  }
}

// The largest magnitude; NaN counts as more than infinity. On bits, whose order is that of magnitudes,
// because a loop over std::max of floats does not become vectors.
float largest_magnitude(const float* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(values[i]) & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return std::bit_cast<float>(largest);
}

// The first place without a finite value, or count.
int64_t find_not_finite(const float* values, int64_t count) {
  if (std::isfinite(largest_magnitude(values, count))) return count;
  return std::find_if(values, values + count, [](float value) { return !std::isfinite(value); }) - values;
}

// Rows of codes and scales in the making.
class RowEncoder {
 public:
  RowEncoder(QuantizeType type, int64_t k, int64_t rows)
      : type_(type),
        k_(k),
        code_bytes_(k / 2),
        scale_bytes_(k / quantize_group(type) * (type == QuantizeType::kQ4 ? 2 : 1)),
        codes_(static_cast<size_t>(rows * code_bytes_)),
        scales_(static_cast<size_t>(rows * scale_bytes_)) {}

  void set_tensor_scale(float scale) { tensor_scale_ = scale; }

  void encode(int64_t row, const float* values) {
    uint8_t* codes = codes_.data() + row * code_bytes_;
    uint8_t* scales = scales_.data() + row * scale_bytes_;
    switch (type_) {
      case QuantizeType::kNvfp4:
        return nvfp4::quantize_row(values, k_, tensor_scale_, codes, scales);
      case QuantizeType::kMxfp4:
        return mxfp4::quantize_row(values, k_, codes, scales);
      case QuantizeType::kQ4:
        // The buffer is aligned for it: a row's scales are 2 * k / 32 bytes.
        return q4::quantize_row(values, k_, codes, reinterpret_cast<uint16_t*>(scales));
    }
  }

  // Hands on rows [0, rows) as rows from `first_row` on.
  Status write(const QuantizeItem& item, int64_t first_row, int64_t rows, const WriteTensor& write) const {
    const auto part = [&](const std::vector<uint8_t>& bytes, int64_t row_bytes) {
      return std::as_bytes(std::span(bytes).first(static_cast<size_t>(rows * row_bytes)));
    };
    NIBBLE_RETURN_IF_ERROR(write(item.first_output, first_row * code_bytes_, part(codes_, code_bytes_)));
    return write(item.first_output + 1, first_row * scale_bytes_, part(scales_, scale_bytes_));
  }

 private:
  QuantizeType type_;
  int64_t k_, code_bytes_, scale_bytes_;
  float tensor_scale_ = 1;
  std::vector<uint8_t> codes_, scales_;
};

Status not_finite(const Checkpoint& checkpoint, const TensorInfo& tensor, float value, int64_t row,
                  int64_t column) {
  return user_error("{}: tensor {}: wanted finite values, found {} at [{}, {}]",
                    checkpoint.file_of(tensor.name), quoted_name(tensor.name), value, row, column);
}

// Calls body(first_row, rows, values) for [N, K] by groups of rows, all checked to be finite.
template <class Body>
Status for_rows(const Checkpoint& checkpoint, const QuantizeItem& item, int64_t chunk_rows,
                const Body& body) {
  const TensorInfo& source = *item.source;
  const int64_t row_bytes = item.k * dtype_bytes(source.dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(chunk_rows * row_bytes));
  std::vector<float> values(static_cast<size_t>(chunk_rows * item.k));
  for (int64_t row = 0; row < item.n; row += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, item.n - row), count = rows * item.k;
    NIBBLE_RETURN_IF_ERROR(checkpoint.read_at(source, row * row_bytes,
                                              std::span(bytes).first(static_cast<size_t>(rows * row_bytes))));
    to_floats(source.dtype, bytes.data(), count, values.data());
    if (const int64_t bad = find_not_finite(values.data(), count); bad < count) {
      return not_finite(checkpoint, source, values[static_cast<size_t>(bad)], row + bad / item.k,
                        bad % item.k);
    }
    NIBBLE_RETURN_IF_ERROR(body(row, rows, values.data()));
  }
  return {};
}

Status quantize_matrix(const Checkpoint& checkpoint, const QuantizeItem& item, QuantizeType type,
                       const WriteTensor& write, const std::function<void(int64_t)>& read) {
  const int64_t row_bytes = item.k * dtype_bytes(item.source->dtype);
  const int64_t chunk_rows = std::clamp(kChunkBytes / row_bytes, int64_t{1}, item.n);
  RowEncoder encoder(type, item.k, chunk_rows);
  if (type == QuantizeType::kNvfp4) {
    // The tensor scale needs all values first; the second reading finds them in the system's cache.
    float amax = 0;
    NIBBLE_RETURN_IF_ERROR(
        for_rows(checkpoint, item, chunk_rows, [&](int64_t, int64_t rows, const float* values) -> Status {
          amax = std::max(amax, largest_magnitude(values, rows * item.k));
          return {};
        }));
    const float scale = nvfp4::choose_tensor_scale(amax);
    encoder.set_tensor_scale(scale);
    NIBBLE_RETURN_IF_ERROR(write(item.first_output + 2, 0, std::as_bytes(std::span(&scale, 1))));
  }
  return for_rows(checkpoint, item, chunk_rows,
                  [&](int64_t row, int64_t rows, const float* values) -> Status {
                    for (int64_t i = 0; i < rows; ++i) encoder.encode(i, values + i * item.k);
                    NIBBLE_RETURN_IF_ERROR(encoder.write(item, row, rows, write));
                    read(rows * row_bytes);
                    return {};
                  });
}

// Slice [K, N] of [E, K, N], stored as [N, K].
Status quantize_stacked(const Checkpoint& checkpoint, const QuantizeItem& item, int64_t slice,
                        QuantizeType type, const WriteTensor& write,
                        const std::function<void(int64_t)>& read) {
  constexpr int64_t kTileRows = 64;  // columns of the source that are gathered together, a cache line or two
  const TensorInfo& source = *item.source;
  const int64_t n = item.n, k = item.k, element_bytes = dtype_bytes(source.dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(k * n * element_bytes));
  NIBBLE_RETURN_IF_ERROR(checkpoint.read_at(source, slice * std::ssize(bytes), bytes));
  RowEncoder encoder(type, k, std::min(n, kTileRows));
  std::vector<float> part(kTileRows), tile(static_cast<size_t>(kTileRows * k));
  for (int64_t first = 0; first < n; first += kTileRows) {
    const int64_t rows = std::min(kTileRows, n - first);
    for (int64_t column = 0; column < k; ++column) {
      to_floats(source.dtype, bytes.data() + (column * n + first) * element_bytes, rows, part.data());
      if (const int64_t bad = find_not_finite(part.data(), rows); bad < rows) {
        return not_finite(checkpoint, source, part[static_cast<size_t>(bad)], slice * k + column,
                          first + bad);
      }
      for (int64_t row = 0; row < rows; ++row)
        tile[static_cast<size_t>(row * k + column)] = part[static_cast<size_t>(row)];
    }
    for (int64_t row = 0; row < rows; ++row) encoder.encode(row, tile.data() + row * k);
    NIBBLE_RETURN_IF_ERROR(encoder.write(item, slice * n + first, rows, write));
  }
  read(std::ssize(bytes));
  return {};
}

}  // namespace

Status quantize_slice(const Checkpoint& checkpoint, const QuantizeItem& item, int64_t slice,
                      QuantizeType type, const WriteTensor& write, const std::function<void(int64_t)>& read) {
  switch (item.kind) {
    case QuantizeItem::Kind::kCopy:
      return copy_tensor(checkpoint, *item.source, item.first_output, write, read);
    case QuantizeItem::Kind::kMatrix:
      return quantize_matrix(checkpoint, item, type, write, read);
    case QuantizeItem::Kind::kStacked:
      return quantize_stacked(checkpoint, item, slice, type, write, read);
  }
  NIBBLE_CHECK(false);
}

}  // namespace nibble
