// Checkpoint::matrix: which format a weight has, and its tensors in that format.
#include <array>
#include <cmath>
#include <optional>

#include "base/numbers.h"
#include "checkpoint/checkpoint.h"
#include "quant/float_codes.h"
#include "quant/nvfp4.h"

namespace nibble {
namespace {

std::optional<MatrixFormat> plain_format(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return MatrixFormat::kF32;
    case DType::kF16:
      return MatrixFormat::kF16;
    case DType::kBF16:
      return MatrixFormat::kBF16;
    default:
      return std::nullopt;
  }
}

}  // namespace

Result<Matrix> Checkpoint::matrix(const std::string& prefix, int64_t n, int64_t k) {
  const std::string weight = prefix + ".weight", packed = prefix + ".weight_packed";
  auto not_implemented = [&](const std::string& name, const char* format) {
    return tensor_error(name, fmt::format("format not implemented yet: {}", format));
  };

  if (has(packed)) {
    if (has(weight))
      return tensor_error(packed, "there is " + quoted_name(weight) + " too; which one counts?");
    const DType dtype = info(packed)->dtype;
    if (dtype == DType::kI32 || dtype == DType::kU32)
      return not_implemented(packed, "compressed-tensors pack-quantized integers");
    const TensorInfo* scale = info(prefix + ".weight_scale");
    if (scale != nullptr && scale->dtype == DType::kU8)
      return not_implemented(packed, "MXFP4 (U8 block scales)");
    return nvfp4_matrix(packed, prefix, n, k);
  }

  if (!has(weight)) {
    struct OtherFormat {
      const char* suffix;
      const char* format;
    };
    constexpr std::array<OtherFormat, 3> kOthers = {{{"_blocks", "MXFP4 of gpt-oss"},
                                                     {".qweight", "GPTQ or AWQ"},
                                                     {".weight_quantized", "compressed integers"}}};
    for (const OtherFormat& other : kOthers) {
      if (has(prefix + other.suffix)) return not_implemented(prefix + other.suffix, other.format);
    }
    return missing(weight, "is missing");
  }

  const TensorInfo& weight_info = *info(weight);
  if (weight_info.dtype == DType::kU8) {
    const TensorInfo* scale = info(prefix + ".weight_scale");
    if (scale != nullptr && scale->dtype == DType::kU8)
      return not_implemented(weight, "MXFP4 (U8 block scales)");
    return nvfp4_matrix(weight, prefix, n, k);
  }
  if (weight_info.dtype == DType::kF8E4M3 || weight_info.dtype == DType::kF8E5M2)
    return not_implemented(weight, has(prefix + ".weight_scale_inv") ? "FP8 with scales in blocks" : "FP8");
  if (weight_info.dtype == DType::kU32 && has(prefix + ".scales"))
    return not_implemented(weight, "MLX affine");
  const std::optional<MatrixFormat> format = plain_format(weight_info.dtype);
  const std::array<int64_t, 2> shape = {n, k};
  if (!format) return mismatch(weight_info, "BF16, F16 or F32 " + format_shape(shape));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView view,
                          tensor(weight, shape, {DType::kBF16, DType::kF16, DType::kF32}));
  return Matrix{.format = *format, .n = n, .k = k, .codes = view.bytes.data()};
}

Result<Matrix> Checkpoint::nvfp4_matrix(const std::string& codes, const std::string& prefix, int64_t n,
                                        int64_t k) {
  const TensorInfo& codes_info = *info(codes);
  const bool is_reciprocal = codes.ends_with("_packed");  // compressed-tensors
  const std::string scales = prefix + ".weight_scale";
  const std::string scale_name = prefix + (is_reciprocal ? ".weight_global_scale" : ".weight_scale_2");
  if (k % nvfp4::kGroup != 0 || k < 0) {
    return tensor_error(
        codes,
        fmt::format("NVFP4 wants a number of columns that is a multiple of {}, found {}", nvfp4::kGroup, k));
  }
  const std::array<int64_t, 2> codes_shape = {n, k / 2}, scales_shape = {n, k / nvfp4::kGroup};
  if (!is_reciprocal && codes_info.shape != std::vector<int64_t>(codes_shape.begin(), codes_shape.end())) {
    const std::array<int64_t, 2> shape = {n, k};
    return mismatch(codes_info, fmt::format("BF16, F16 or F32 {}, or NVFP4 as U8 {}", format_shape(shape),
                                            format_shape(codes_shape)));
  }
  for (const std::string& name : {scales, scale_name}) {
    if (!has(name))
      return missing(name, "is missing, and " + quoted_name(codes) + " (" +
                               std::string(dtype_name(codes_info.dtype)) + ") needs it");
  }
  NIBBLE_ASSIGN_OR_RETURN(const TensorView codes_view, tensor(codes, codes_shape, {DType::kU8}));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView scales_view, tensor(scales, scales_shape, {DType::kF8E4M3}));
  NIBBLE_ASSIGN_OR_RETURN(const float scale, tensor_scale(scale_name));

  const auto* scale_codes = reinterpret_cast<const uint8_t*>(scales_view.bytes.data());
  if (std::optional<size_t> at = find_e4m3_nan({scale_codes, scales_view.bytes.size()})) {
    const auto columns = static_cast<size_t>(scales_shape[1]);
    return tensor_error(scales, fmt::format("block scale at row {}, column {} is NaN (byte 0x{:02x})",
                                            *at / columns, *at % columns, scale_codes[*at]));
  }
  const float multiplier = is_reciprocal ? 1.0f / scale : scale;
  const bool is_good = is_reciprocal ? scale > 0 && std::isfinite(multiplier) : scale >= 0;
  if (!is_good) {
    return tensor_error(scale_name, fmt::format("wanted a finite value {} 0{}, found {}",
                                                is_reciprocal ? "above" : "of at least",
                                                is_reciprocal ? " with a finite reciprocal" : "", scale));
  }
  // Activation scales of calibration; ours are computed (formats.md 4), and theirs may be 0.
  ignore(prefix + (is_reciprocal ? ".input_global_scale" : ".input_scale"));
  return Matrix{.format = MatrixFormat::kNvfp4,
                .n = n,
                .k = k,
                .codes = codes_view.bytes.data(),
                .scales = scale_codes,
                .tensor_scale = multiplier};
}

Result<float> Checkpoint::tensor_scale(const std::string& name) {
  // Writers store a scalar as [] or as [1].
  const TensorInfo* scale_info = info(name);
  const bool is_vector = scale_info != nullptr && scale_info->shape.size() == 1;
  constexpr std::array<int64_t, 1> kOne = {1};
  const std::span<const int64_t> shape =
      is_vector ? std::span<const int64_t>(kOne) : std::span<const int64_t>();
  NIBBLE_ASSIGN_OR_RETURN(const TensorView view, tensor(name, shape, {DType::kF32}));
  const float scale = *reinterpret_cast<const float*>(view.bytes.data());
  if (!std::isfinite(scale)) return tensor_error(name, fmt::format("wanted a finite value, found {}", scale));
  return scale;
}

}  // namespace nibble
