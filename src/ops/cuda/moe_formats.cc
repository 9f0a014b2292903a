#include "ops/cuda/moe_formats.h"

#include <fmt/format.h>

#include <algorithm>

#include "ops/cuda/moe_decode.h"

namespace nibble::cuda {
namespace {

// What an e8m0 scale may be so that a weight times 2^-7 is a normal bfloat16, and the scale times 2^119 a
// finite one (moe_decode.cu): 2^-118 to 2^8.
constexpr uint8_t kLeastExponent = 9, kMostExponent = 135;

}  // namespace

TensorCores tensor_cores_for(std::span<const ExpertWeights> experts, std::string& why) {
  const MatrixFormat format = experts[0].gate.format;
  if (format != MatrixFormat::kNvfp4 && format != MatrixFormat::kMxfp4) {
    why = fmt::format("experts in {}, not in nvfp4 or mxfp4", matrix_format_name(format));
    return TensorCores::kOtherFormat;
  }
  if (std::ssize(experts) > kMaxExperts) {
    why = fmt::format("{} experts, more than {}", experts.size(), kMaxExperts);
    return TensorCores::kNo;
  }
  for (const ExpertWeights& expert : experts) {
    for (const Matrix* m : {&expert.gate, &expert.up, &expert.down}) {
      if (m->format != format) {
        why = "experts in different formats";
        return TensorCores::kNo;
      }
      if (format != MatrixFormat::kMxfp4) continue;
      const auto* scales = static_cast<const uint8_t*>(m->scales);
      const std::span<const uint8_t> all(scales, static_cast<size_t>(matrix_scale_bytes(format, m->n, m->k)));
      const auto [least, most] = std::ranges::minmax(all);
      if (least < kLeastExponent || most > kMostExponent) {
        why = fmt::format("block scales from 2^{} to 2^{}, outside of 2^{} to 2^{}", least - 127, most - 127,
                          kLeastExponent - 127, kMostExponent - 127);
        return TensorCores::kNo;
      }
    }
  }
  return TensorCores::kYes;
}

}  // namespace nibble::cuda
