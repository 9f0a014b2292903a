#include "ops/cuda/moe_formats.h"

#include <fmt/format.h>

#include "ops/cuda/gguf_split.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/moe_decode.h"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {
namespace {

// What an e8m0 scale may be so that a weight times 2^-7 is a normal bfloat16, and the scale times 2^119 a
// finite one (moe_decode.cu): 2^-118 to 2^8.
constexpr uint8_t kLeastExponent = 9, kMostExponent = 135;

// "", or in words that a kernel on tensor cores cannot have what it needs.
std::string why_not_on(const Device& device, int64_t needed_bytes) {
  if (device.compiled_for < kHopper) {
    return fmt::format(
        "the kernels here are for compute capability {}.{}, those on tensor cores want {}.{} or later",
        device.compiled_for / 10, device.compiled_for % 10, kHopper / 10, kHopper % 10);
  }
  if (needed_bytes <= device.shared_bytes) return "";
  return fmt::format("a block needs {} bytes of shared memory, the device gives it {}", needed_bytes,
                     device.shared_bytes);
}

}  // namespace

std::string why_no_packing(MatrixFormat format, const Device& device, const MoePaths& paths) {
  if (!has_tiles(format))
    return fmt::format("in {}, not in NVFP4, MXFP4, q4 or BF16", matrix_format_name(format));
  if (format == MatrixFormat::kBF16) {
    if (!paths.has_wgmma) return "in BF16, whose kernels want wgmma";
    return paths.path == "few" ? "in BF16, whose kernels are those for many" : why_no_tiles(device);
  }
  return why_not_on(device, moe_decode_shared_bytes(tile_kind({.format = format})));
}

std::string why_not_packed(std::span<const ExpertWeights> experts, const Device& device,
                           const MoePaths& paths) {
  const MatrixFormat format = experts[0].gate.format;
  std::string why = why_no_packing(format, device, paths);
  if (!why.empty()) return why;
  if (std::ssize(experts) > kMaxExperts) {
    return fmt::format("{} in a layer, more than {}", experts.size(), kMaxExperts);
  }
  for (const ExpertWeights& expert : experts) {
    for (const Matrix* m : {&expert.gate, &expert.up, &expert.down}) {
      if (split_format(m->format) != split_format(format)) return "in different formats";
      if (why = why_not_tiles(*m); !why.empty()) return why;
    }
  }
  return "";
}

std::string why_no_tiles(const Device& device) { return why_not_on(device, kMaxSharedBytes); }

std::string why_not_tiles(const Matrix& m) {
  if (split_format(m.format) != MatrixFormat::kMxfp4) return "";
  const auto [least, most] = mxfp4_scale_range(m);
  if (least >= kLeastExponent && most <= kMostExponent) return "";
  return fmt::format("block scales outside of 2^{} to 2^{}", kLeastExponent - 127, kMostExponent - 127);
}

}  // namespace nibble::cuda
