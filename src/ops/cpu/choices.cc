#include "ops/cpu/choices.h"

#include <fmt/ranges.h>

#include <string_view>

#include "ops/cpu/isa.h"
#include "ops/cpu/weight_tiles.h"

namespace nibble::cpu {
namespace {

// What a row is in it.
std::string_view packing_name(Packing packing) {
  switch (packing) {
    case Packing::kPlain:
      return "float32";
    case Packing::kFixed:
      return "integers of 23 bits";
    case Packing::kInt8:
      return "integers of 8 bits";
    case Packing::kPairs:
      return "bfloat16";
  }
  return "";
}

// The kernels' view of a matrix of this format, once it is placed.
Weights placed(MatrixFormat format, Rounding rounding, bool makes_tiles) {
  const std::optional<MatrixFormat> tiles = makes_tiles ? tile_format(format) : std::nullopt;
  const int64_t columns = matrix_format_info(format).group * 2;  // whole blocks, and even
  return kernel_weights({.format = tiles.value_or(format), .n = 1, .k = columns, .tiled = tiles.has_value()},
                        rounding);
}

}  // namespace

std::vector<std::string> choices(const Kernels& kernels, bool asked, Rounding rounding, bool makes_tiles) {
  std::vector<std::string_view> usable;
  for (const Kernels* each : usable_kernels()) usable.push_back(each->isa);
  std::vector<std::string> lines = {
      fmt::format("kernels: {}, {} {}", kernels.isa,
                  asked ? "as asked; machine and build have" : "the first that machine and build have of",
                  fmt::join(usable, ", "))};
  for (Packing packing : {Packing::kPlain, Packing::kFixed, Packing::kInt8, Packing::kPairs}) {
    for (bool decoded : {false, true}) {
      std::vector<std::string_view> formats;
      for (const MatrixFormatInfo& info : matrix_formats()) {
        const Weights weights = placed(info.format, rounding, makes_tiles);
        if (weights.packing == packing && (weights.format == WeightFormat::kDecoded) == decoded)
          formats.push_back(info.name);
      }
      if (formats.empty()) continue;
      lines.push_back(fmt::format("activations as {} into weights in {}{}", packing_name(packing),
                                  fmt::join(formats, ", "), decoded ? ", decoded for each product" : ""));
    }
  }
  return lines;
}

}  // namespace nibble::cpu
