#include "ops/cuda/moe_formats.h"

#include <fmt/format.h>

#include <algorithm>

#include "ops/cuda/moe_decode.h"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {
namespace {

// What an e8m0 scale may be so that a weight times 2^-7 is a normal bfloat16, and the scale times 2^119 a
// finite one (moe_decode.cu): 2^-118 to 2^8.
constexpr uint8_t kLeastExponent = 9, kMostExponent = 135;

// "", or in words that a block cannot have what it needs.
std::string why_no_room(int64_t needed_bytes, int64_t shared_bytes) {
  if (needed_bytes <= shared_bytes) return "";
  return fmt::format("a block needs {} bytes of shared memory, the device gives it {}", needed_bytes,
                     shared_bytes);
}

}  // namespace

std::string why_no_packing(MatrixFormat format, int64_t shared_bytes) {
  if (format != MatrixFormat::kNvfp4 && format != MatrixFormat::kMxfp4) {
    return fmt::format("in {}, not in NVFP4 or MXFP4", matrix_format_name(format));
  }
  return why_no_room(moe_decode_shared_bytes(block_of(format)), shared_bytes);
}

std::string why_not_packed(std::span<const ExpertWeights> experts, int64_t shared_bytes) {
  const MatrixFormat format = experts[0].gate.format;
  std::string why = why_no_packing(format, shared_bytes);
  if (!why.empty()) return why;
  if (std::ssize(experts) > kMaxExperts) {
    return fmt::format("{} in a layer, more than {}", experts.size(), kMaxExperts);
  }
  for (const ExpertWeights& expert : experts) {
    for (const Matrix* m : {&expert.gate, &expert.up, &expert.down}) {
      if (m->format != format) return "in different formats";
      if (why = why_not_tiles(*m); !why.empty()) return why;
    }
  }
  return "";
}

std::string why_no_tiles(int64_t shared_bytes) { return why_no_room(kMaxSharedBytes, shared_bytes); }

std::string why_not_tiles(const Matrix& m) {
  if (m.format != MatrixFormat::kMxfp4) return "";
  const auto* scales = static_cast<const uint8_t*>(m.scales);
  const std::span<const uint8_t> all(scales, static_cast<size_t>(matrix_scale_bytes(m.format, m.n, m.k)));
  const auto [least, most] = std::ranges::minmax(all);
  if (least >= kLeastExponent && most <= kMostExponent) return "";
  return fmt::format("block scales outside of 2^{} to 2^{}", kLeastExponent - 127, kMostExponent - 127);
}

}  // namespace nibble::cuda
