#include "ops/cuda/choices.h"

#include <fmt/ranges.h>

#include <functional>
#include <string_view>

#include "base/one_line.h"
#include "ops/cuda/moe_decode.h"
#include "ops/cuda/moe_formats.h"
#include "ops/cuda/moe_workspace.h"
#include "ops/cuda/tile_gemm.h"

namespace nibble::cuda {
namespace {

// From the first to the last number of rows for which it holds, which it does for all between.
std::string rows_where(const std::function<bool(int64_t)>& holds) {
  constexpr int64_t kMost = 1024;
  int64_t first = 1;
  while (first <= kMost && !holds(first)) ++first;
  int64_t last = first;
  while (last < kMost && holds(last + 1)) ++last;
  if (first > kMost) return "no number of rows";
  return last < kMost ? fmt::format("{} to {} rows", first, last) : fmt::format("{} rows and more", first);
}

std::string products(MatrixFormat format) {
  const int64_t few = few_rows(tile_kind({.format = format}));
  std::string name(matrix_format_name(format));
  if (format == MatrixFormat::kBF16) name += " (kept in 12 bits without loss, where their exponents allow)";
  if (!has_wgmma()) {
    return fmt::format(
        "products with {}: tensor cores, mma.sync for any number of rows (no wgmma in this build for this "
        "device)",
        name);
  }
  return fmt::format("products with {}: tensor cores, mma.sync for up to {} rows, wgmma for more", name, few);
}

std::string experts(MatrixFormat format, const Device& device, const MoePaths& paths) {
  const std::string why =
      paths.path == "portable" ? "moe-path portable" : why_no_packing(format, device, paths);
  const std::string_view name = matrix_format_name(format);
  if (!why.empty()) return fmt::format("routed experts in {}: float32 kernels: {}", name, why);
  if (format == MatrixFormat::kBF16)
    return fmt::format("routed experts in {}: tensor cores, wgmma for any number of rows", name);
  const TileKind kind = tile_kind({.format = format});
  const bool roomy = moe_decode_is_roomy(kind, device.shared_bytes);
  return fmt::format(
             "routed experts in {}: tensor cores, {} KiB of shared memory a block of the {} there are; {}",
             name, (roomy ? moe_decode_roomy_bytes(kind) : moe_decode_shared_bytes(kind)) >> 10,
             device.shared_bytes >> 10,
             roomy ? fmt::format("up to {} rows are routed and grouped in the same launch", kFewTokens)
                   : "too little for routing and grouping few rows in the same launch") +
         (paths.path != "auto" ? "; moe-path " + paths.path
          : paths.has_wgmma
              ? fmt::format(
                    "; wgmma for steps of more than {} rows with more than {} an expert on average (rule)",
                    kMostJoined, kMaxRows)
              : "");
}

}  // namespace

std::string without_tensor_cores(const Device& device, const std::string& tensor_cores) {
  const std::string why = why_no_tiles(device);
  if (tensor_cores == "off" || why.empty()) return "";
  const bool has_experts = why_no_packing(MatrixFormat::kNvfp4, device, {}).empty();
  return fmt::format("; without tensor cores{}: {}", has_experts ? " but for experts" : "", why);
}

std::vector<std::string> choices(const Device& device, const std::string& tensor_cores, bool graphs,
                                 const MoePaths& paths) {
  std::vector<std::string> lines;
  if (tensor_cores == "off") {
    lines.emplace_back(
        "products and routed experts in any format: float32 kernels; tensor cores are off for them");
  } else {
    std::vector<std::string_view> others;
    const std::string why = why_no_tiles(device);
    for (const MatrixFormatInfo& info : matrix_formats()) {
      if (!has_tiles(info.format)) {
        others.push_back(info.name);
      } else if (why.empty()) {
        lines.push_back(products(info.format));
      } else {
        lines.push_back(fmt::format("products with {}: float32 kernels: {}", info.name, why));
      }
    }
    lines.push_back(
        fmt::format("products with {}: float32 kernels, none on tensor cores", fmt::join(others, ", ")));
    for (const MatrixFormatInfo& info : matrix_formats()) {
      if (has_tiles(info.format)) lines.push_back(experts(info.format, device, paths));
    }
    for (const auto& [layer, tokens] : paths.crossovers)
      lines.push_back(fmt::format("{}: wgmma for more than {} rows (measured)", one_line(layer), tokens));
    if (why.empty() && paths.path != "portable" && paths.path != "many") {
      lines.push_back(fmt::format(
          "a shared expert's last product in BF16: in the launch of routed experts of 4 bits for {}",
          rows_where([](int64_t rows) { return can_join_experts(TileKind::kBF16, rows); })));
    }
    lines.emplace_back("routed experts in other formats: float32 kernels, none on tensor cores");
  }
  lines.emplace_back(
      "attention: tensor cores, float32 numbers in two parts; prompts of heads of 64 or 128 by tiles of "
      "rows");
  lines.emplace_back(graphs ? "steps of few rows: recorded as graphs and replayed"
                            : "steps: launch by launch, since graphs are off");
  return lines;
}

}  // namespace nibble::cuda
