#include "quant/split_format.h"

#include <algorithm>

namespace nibble {

ScaleRange mxfp4_scale_range(const Matrix& m) {
  // Apart, or the first byte of each GGUF block.
  const bool is_gguf = m.format == MatrixFormat::kGgufMxfp4;
  const auto* scales = static_cast<const uint8_t*>(is_gguf ? m.codes : m.scales);
  const int64_t step = is_gguf ? matrix_format_info(m.format).group_bytes : 1;
  ScaleRange range;
  for (int64_t i = 0; i < matrix_scale_bytes(MatrixFormat::kMxfp4, m.n, m.k); ++i) {
    range.least = std::min(range.least, scales[i * step]);
    range.most = std::max(range.most, scales[i * step]);
  }
  return range;
}

}  // namespace nibble
