// Checkpoint::stacked: the experts of one parameter, as gpt-oss stores them.
#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "base/numbers.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/stacked_names.h"

namespace nibble {
namespace {

// Row i of the split is row step * i + first of the tensor.
struct RowStep {
  int64_t step, first;
};
RowStep rows_of(RowSplit split) { return {split == RowSplit::kAll ? 1 : 2, split == RowSplit::kOdd ? 1 : 0}; }

// in [k, step * n] to out [n, k], in tiles whose rows of both sides stay in the L1 cache.
template <class T>
void transpose(const T* in, int64_t n, int64_t k, RowStep rows, T* out) {
  constexpr int64_t kTile = 32;
  for (int64_t k0 = 0; k0 < k; k0 += kTile) {
    for (int64_t n0 = 0; n0 < n; n0 += kTile) {
      for (int64_t c = k0; c < std::min(k, k0 + kTile); ++c) {
        for (int64_t r = n0; r < std::min(n, n0 + kTile); ++r)
          out[r * k + c] = in[(c * n + r) * rows.step + rows.first];
      }
    }
  }
}

}  // namespace

Result<std::byte*> Checkpoint::own(int64_t bytes, const std::string& name, MatrixFormat format) {
  std::unique_ptr<std::byte[]> memory(new (std::nothrow) std::byte[static_cast<size_t>(bytes)]);
  if (memory == nullptr)
    return tensor_error(name, fmt::format("no memory for a copy of {}", format_bytes(bytes)));
  owned_.push_back({format, std::move(memory)});
  return owned_.back().memory.get();
}

int64_t Checkpoint::own_bytes() const {
  const std::string prefix = "experts.";
  const StackedNames gate_up(prefix + kStackedGateUp), down(prefix + kStackedDown);
  // What stacked() splits or transposes: not down in MXFP4.
  const std::array copied = {gate_up.blocks, gate_up.scales, gate_up.plain, down.plain};
  int64_t total = 0;
  for (const TensorInfo* tensor : tensors()) {
    if (std::ranges::any_of(copied, [&](const std::string& name) { return tensor->name.ends_with(name); }))
      total = checked_add(total, tensor->bytes).value_or(INT64_MAX);
  }
  return total;
}

void Checkpoint::release(const FormatsCopied& copied) {
  std::erase_if(owned_, [&](const Owned& own) { return copied(own.format); });
}

Result<const std::byte*> Checkpoint::split_rows(const TensorView& view, int64_t rows, int64_t row_bytes,
                                                RowSplit split) {
  if (split == RowSplit::kAll) return view.bytes.data();
  const RowStep from = rows_of(split);
  NIBBLE_ASSIGN_OR_RETURN(std::byte* const copy,
                          own(rows * row_bytes, view.info->name, MatrixFormat::kMxfp4));
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(copy + r * row_bytes, view.bytes.data() + (r * from.step + from.first) * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  return copy;
}

Result<std::vector<Matrix>> Checkpoint::stacked(const std::string& name, int64_t experts, int64_t n,
                                                int64_t k, RowSplit split) {
  const StackedNames names(name);
  const std::string &blocks = names.blocks, &scales = names.scales;
  if (!has(blocks) && !has(name)) return missing(blocks, "is missing");
  if (has(blocks) && has(name))
    return tensor_error(blocks, "there is " + quoted_name(name) + " too; which one counts?");
  const MatrixFormatInfo& format = matrix_format_info(MatrixFormat::kMxfp4);
  const int64_t all_n = checked_mul(n, rows_of(split).step).value_or(-1);  // -1: no tensor has such a shape
  if (!has(blocks)) {
    const std::array<int64_t, 3> shape = {experts, k, all_n};
    NIBBLE_ASSIGN_OR_RETURN(const TensorView view,
                            tensor(name, shape, {DType::kBF16, DType::kF16, DType::kF32}));
    return transposed(view, experts, n, k, split);
  }

  NIBBLE_RETURN_IF_ERROR(check_group(format.format, blocks, k));
  NIBBLE_RETURN_IF_ERROR(require(scales, blocks));
  const std::array<int64_t, 4> blocks_shape = {experts, all_n, k / format.group, format.group_bytes};
  const std::array<int64_t, 3> scales_shape = {experts, all_n, k / format.group};
  NIBBLE_ASSIGN_OR_RETURN(const TensorView blocks_view, tensor(blocks, blocks_shape, {DType::kU8}));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView scales_view, tensor(scales, scales_shape, {DType::kU8}));
  NIBBLE_RETURN_IF_ERROR(check_scales(scales, scales_view, scales_shape[2]));
  const int64_t code_row = format.code_row_bytes(k), scale_row = format.scale_row_bytes(k);
  NIBBLE_ASSIGN_OR_RETURN(const std::byte* const codes,
                          split_rows(blocks_view, experts * n, code_row, split));
  NIBBLE_ASSIGN_OR_RETURN(const std::byte* const scale_codes,
                          split_rows(scales_view, experts * n, scale_row, split));
  std::vector<Matrix> matrices(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) {
    matrices[static_cast<size_t>(e)] = {.format = format.format,
                                        .n = n,
                                        .k = k,
                                        .codes = codes + e * n * code_row,
                                        .scales = scale_codes + e * n * scale_row};
  }
  return matrices;
}

Result<std::vector<Matrix>> Checkpoint::transposed(const TensorView& view, int64_t experts, int64_t n,
                                                   int64_t k, RowSplit split) {
  const DType dtype = view.info->dtype;
  const bool is_wide = dtype == DType::kF32;
  const int64_t bytes = n * k * dtype_bytes(dtype);
  const RowStep rows = rows_of(split);
  NIBBLE_ASSIGN_OR_RETURN(std::byte* const copy,
                          own(experts * bytes, view.info->name, *plain_matrix_format(dtype)));
  std::vector<Matrix> matrices(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) {
    const std::byte* in = view.bytes.data() + e * bytes * rows.step;
    std::byte* out = copy + e * bytes;
    if (is_wide) {
      transpose(reinterpret_cast<const uint32_t*>(in), n, k, rows, reinterpret_cast<uint32_t*>(out));
    } else {
      transpose(reinterpret_cast<const uint16_t*>(in), n, k, rows, reinterpret_cast<uint16_t*>(out));
    }
    matrices[static_cast<size_t>(e)] = {.format = *plain_matrix_format(dtype), .n = n, .k = k, .codes = out};
  }
  return matrices;
}

Result<std::vector<float>> Checkpoint::stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                                    RowSplit split) {
  const RowStep rows = rows_of(split);
  const std::array<int64_t, 2> shape = {experts, checked_mul(n, rows.step).value_or(-1)};
  NIBBLE_ASSIGN_OR_RETURN(std::vector<float> biases, floats(StackedNames(name).bias, shape));
  const size_t count = biases.size() / static_cast<size_t>(rows.step);
  for (size_t i = 0; i < count; ++i)
    biases[i] = biases[i * static_cast<size_t>(rows.step) + static_cast<size_t>(rows.first)];
  biases.resize(count);
  return biases;
}

}  // namespace nibble
