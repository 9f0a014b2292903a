// GGUF's blocks of the numbers of NVFP4, MXFP4 and q4, whose codes and scales the plain formats have apart.
#pragma once

#include <cstdint>

#include "quant/matrix.h"

namespace nibble {

// What a matrix of such blocks is in once it is split; of any other its own format.
constexpr MatrixFormat split_format(MatrixFormat format) {
  using enum MatrixFormat;
  if (format == kGgufNvfp4) return kNvfp4;
  if (format == kGgufMxfp4) return kMxfp4;
  return format == kGgufQ4_0 ? kQ4 : format;
}

struct ScaleRange {
  uint8_t least = 255, most = 0;
};
// Of the e8m0 scales of a matrix whose split_format() is MXFP4.
ScaleRange mxfp4_scale_range(const Matrix& matrix);

}  // namespace nibble
