// Checkpoint::matrix: which format a weight has, and its tensors in that format.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "base/numbers.h"
#include "checkpoint/checkpoint.h"
#include "quant/float_codes.h"
#include "quant/nvfp4.h"

namespace nibble {
namespace {

// The first scale that is NaN or infinite.
std::optional<size_t> find_bad_scale(const TensorView& scales) {
  const std::byte* bytes = scales.bytes.data();
  const size_t count = scales.bytes.size() / static_cast<size_t>(dtype_bytes(scales.info->dtype));
  auto find = [&](const auto* values, auto is_bad) -> std::optional<size_t> {
    const auto* at = std::find_if(values, values + count, is_bad);
    if (at == values + count) return std::nullopt;
    return static_cast<size_t>(at - values);
  };
  switch (scales.info->dtype) {
    case DType::kF8E4M3:
      return find_e4m3_nan({reinterpret_cast<const uint8_t*>(bytes), count});
    case DType::kU8:  // e8m0
      return find(reinterpret_cast<const uint8_t*>(bytes), [](uint8_t code) { return code == 0xFF; });
    case DType::kF16:
      return find(reinterpret_cast<const uint16_t*>(bytes),
                  [](uint16_t code) { return (code & 0x7C00) == 0x7C00; });
    case DType::kF32:
      return find(reinterpret_cast<const float*>(bytes), [](float scale) { return !std::isfinite(scale); });
    default:
      NIBBLE_CHECK(false);
  }
}

// "NaN (byte 0x7f)", "inf"
std::string describe_scale(const TensorView& scales, size_t at) {
  const std::byte* bytes = scales.bytes.data();
  switch (scales.info->dtype) {
    case DType::kF16:
      return fmt::format("{}", f16_to_float(reinterpret_cast<const uint16_t*>(bytes)[at]));
    case DType::kF32:
      return fmt::format("{}", reinterpret_cast<const float*>(bytes)[at]);
    default:
      return fmt::format("NaN (byte 0x{:02x})", static_cast<unsigned>(bytes[at]));
  }
}

}  // namespace

Result<Matrix> Checkpoint::matrix(const std::string& prefix, int64_t n, int64_t k) {
  const std::string weight = prefix + ".weight", packed = prefix + ".weight_packed";
  const std::string q4 = prefix + ".weight_q4", scale = prefix + ".weight_scale";
  auto not_implemented = [&](const std::string& name, const char* format) {
    return tensor_error(name, fmt::format("format not implemented yet: {}", format));
  };
  auto dtype_of = [&](const std::string& name) -> std::optional<DType> {
    const TensorInfo* there = info(name);
    return there == nullptr ? std::nullopt : std::optional(there->dtype);
  };

  for (const std::string& codes : {packed, q4}) {
    if (has(codes) && has(weight))
      return tensor_error(codes, "there is " + quoted_name(weight) + " too; which one counts?");
  }
  if (has(packed)) {
    const std::optional<DType> dtype = dtype_of(packed);
    if (dtype == DType::kI32 || dtype == DType::kU32)
      return not_implemented(packed, "compressed-tensors pack-quantized integers");
    if (dtype_of(scale) != DType::kU8) return nvfp4_matrix(packed, prefix, n, k);
    const std::array<int64_t, 2> shape = {n, k / 2};
    return group32_matrix(MatrixFormat::kMxfp4, packed, DType::kU8, shape, scale, DType::kU8, n, k);
  }
  if (has(q4)) {
    const std::array<int64_t, 3> shape = {n, k / 32, 4};
    return group32_matrix(MatrixFormat::kQ4, q4, DType::kU32, shape, scale, DType::kF16, n, k);
  }

  if (!has(weight)) {
    struct OtherFormat {
      const char* suffix;
      const char* format;
    };
    constexpr std::array<OtherFormat, 3> kOthers = {{{"_blocks", "MXFP4 of gpt-oss in a single matrix"},
                                                     {".qweight", "GPTQ or AWQ"},
                                                     {".weight_quantized", "compressed integers"}}};
    for (const OtherFormat& other : kOthers) {
      if (has(prefix + other.suffix)) return not_implemented(prefix + other.suffix, other.format);
    }
    return missing(weight, "is missing");
  }

  const TensorInfo& weight_info = *info(weight);
  switch (weight_info.dtype) {
    case DType::kU8:
      if (dtype_of(scale) == DType::kU8) return not_implemented(weight, "MXFP4 (U8 block scales)");
      return nvfp4_matrix(weight, prefix, n, k);
    case DType::kF8E4M3:
      return fp8_matrix(prefix, n, k);
    case DType::kF8E5M2:
      return not_implemented(weight, "FP8 in E5M2");
    case DType::kU32:
      if (has(prefix + ".scales")) return not_implemented(weight, "MLX affine");
      break;
    default:
      break;
  }
  const std::optional<MatrixFormat> format = plain_matrix_format(weight_info.dtype);
  const std::array<int64_t, 2> shape = {n, k};
  if (!format) return mismatch(weight_info, "BF16, F16 or F32 " + format_shape(shape));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView view,
                          tensor(weight, shape, {DType::kBF16, DType::kF16, DType::kF32}));
  return Matrix{.format = *format, .n = n, .k = k, .codes = view.bytes.data()};
}

Status Checkpoint::require(const std::string& scales, const std::string& codes) const {
  if (has(scales)) return {};
  return missing(scales, fmt::format("is missing, and {} ({}) needs it", quoted_name(codes),
                                     dtype_name(info(codes)->dtype)));
}

Status Checkpoint::check_group(MatrixFormat format, const std::string& name, int64_t k) const {
  const MatrixFormatInfo& format_info = matrix_format_info(format);
  if (k >= 0 && k % format_info.group == 0) return {};
  return tensor_error(name, fmt::format("{} wants a number of columns that is a multiple of {}, found {}",
                                        format_info.name, format_info.group, k));
}

Status Checkpoint::check_scales(const std::string& name, const TensorView& scales, int64_t columns) const {
  const std::optional<size_t> at = find_bad_scale(scales);
  if (!at) return {};
  const auto width = static_cast<size_t>(columns);
  return tensor_error(name, fmt::format("block scale at row {}, column {} is {}", *at / width, *at % width,
                                        describe_scale(scales, *at)));
}

Result<Matrix> Checkpoint::nvfp4_matrix(const std::string& codes, const std::string& prefix, int64_t n,
                                        int64_t k) {
  const TensorInfo& codes_info = *info(codes);
  const bool is_reciprocal = codes.ends_with("_packed");  // compressed-tensors
  const std::string scales = prefix + ".weight_scale";
  const std::string scale_name = prefix + (is_reciprocal ? ".weight_global_scale" : ".weight_scale_2");
  NIBBLE_RETURN_IF_ERROR(check_group(MatrixFormat::kNvfp4, codes, k));
  const std::array<int64_t, 2> codes_shape = {n, k / 2}, scales_shape = {n, k / nvfp4::kGroup};
  if (!is_reciprocal && codes_info.shape != std::vector<int64_t>(codes_shape.begin(), codes_shape.end())) {
    const std::array<int64_t, 2> shape = {n, k};
    return mismatch(codes_info, fmt::format("BF16, F16 or F32 {}, or NVFP4 as U8 {}", format_shape(shape),
                                            format_shape(codes_shape)));
  }
  for (const std::string& name : {scales, scale_name}) NIBBLE_RETURN_IF_ERROR(require(name, codes));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView codes_view, tensor(codes, codes_shape, {DType::kU8}));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView scales_view, tensor(scales, scales_shape, {DType::kF8E4M3}));
  NIBBLE_ASSIGN_OR_RETURN(const float scale, tensor_scale(scale_name));
  NIBBLE_RETURN_IF_ERROR(check_scales(scales, scales_view, scales_shape[1]));
  const float multiplier = is_reciprocal ? 1.0f / scale : scale;
  const bool is_good = is_reciprocal ? scale > 0 && std::isfinite(multiplier) : scale >= 0;
  if (!is_good) {
    return tensor_error(scale_name, fmt::format("wanted a finite value {} 0{}, found {}",
                                                is_reciprocal ? "above" : "of at least",
                                                is_reciprocal ? " with a finite reciprocal" : "", scale));
  }
  const float input = input_scale(prefix + (is_reciprocal ? ".input_global_scale" : ".input_scale"));
  return Matrix{.format = MatrixFormat::kNvfp4,
                .n = n,
                .k = k,
                .codes = codes_view.bytes.data(),
                .scales = scales_view.bytes.data(),
                .tensor_scale = multiplier,
                .input_scale = is_reciprocal && input != 0 ? 1.0f / input : input};
}

Result<Matrix> Checkpoint::group32_matrix(MatrixFormat format, const std::string& codes, DType codes_dtype,
                                          std::span<const int64_t> codes_shape, const std::string& scales,
                                          DType scales_dtype, int64_t n, int64_t k) {
  NIBBLE_RETURN_IF_ERROR(check_group(format, codes, k));
  NIBBLE_RETURN_IF_ERROR(require(scales, codes));
  const std::array<int64_t, 2> scales_shape = {n, k / matrix_format_info(format).scale_columns};
  NIBBLE_ASSIGN_OR_RETURN(const TensorView codes_view, tensor(codes, codes_shape, {codes_dtype}));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView scales_view, tensor(scales, scales_shape, {scales_dtype}));
  NIBBLE_RETURN_IF_ERROR(check_scales(scales, scales_view, scales_shape[1]));
  return Matrix{
      .format = format, .n = n, .k = k, .codes = codes_view.bytes.data(), .scales = scales_view.bytes.data()};
}

Result<Matrix> Checkpoint::fp8_matrix(const std::string& prefix, int64_t n, int64_t k) {
  const std::string codes = prefix + ".weight", blocks = prefix + ".weight_scale_inv";
  const std::string scale_name = prefix + ".weight_scale";
  const std::array<int64_t, 2> shape = {n, k};
  NIBBLE_ASSIGN_OR_RETURN(const TensorView view, tensor(codes, shape, {DType::kF8E4M3}));
  const auto* bytes = reinterpret_cast<const uint8_t*>(view.bytes.data());
  if (std::optional<size_t> at = find_e4m3_nan({bytes, view.bytes.size()})) {
    const auto columns = static_cast<size_t>(k);
    return tensor_error(codes, fmt::format("the weight at row {}, column {} is NaN (byte 0x{:02x})",
                                           *at / columns, *at % columns, bytes[*at]));
  }
  Matrix matrix{.format = MatrixFormat::kF8E4M3, .n = n, .k = k, .codes = bytes};
  ignore(prefix + ".input_scale");
  if (has(blocks)) {
    matrix.format = MatrixFormat::kFp8Block;
    const MatrixFormatInfo& format = matrix_format_info(matrix.format);
    const std::array<int64_t, 2> scales_shape = {ceil_div(n, format.scale_rows),
                                                 ceil_div(k, format.scale_columns)};
    NIBBLE_ASSIGN_OR_RETURN(const TensorView scales, tensor(blocks, scales_shape, {DType::kF32}));
    NIBBLE_RETURN_IF_ERROR(check_scales(blocks, scales, scales_shape[1]));
    matrix.scales = scales.bytes.data();
    return matrix;
  }
  NIBBLE_RETURN_IF_ERROR(require(scale_name, codes));
  NIBBLE_ASSIGN_OR_RETURN(matrix.tensor_scale, tensor_scale(scale_name));
  if (!(matrix.tensor_scale >= 0))
    return tensor_error(scale_name,
                        fmt::format("wanted a finite value of at least 0, found {}", matrix.tensor_scale));
  return matrix;
}

float Checkpoint::input_scale(const std::string& name) {
  ignore(name);
  const TensorInfo* there = info(name);
  constexpr int64_t kBytes = sizeof(float);
  if (there == nullptr || there->dtype != DType::kF32 || there->bytes != kBytes) return 0;
  float scale = 0;
  const Status read = read_at(*there, 0, std::as_writable_bytes(std::span(&scale, 1)));
  return read.ok() ? scale : std::numeric_limits<float>::quiet_NaN();
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
