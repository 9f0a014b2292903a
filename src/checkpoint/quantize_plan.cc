#include "checkpoint/quantize_plan.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "base/numbers.h"
#include "checkpoint/stacked_names.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"
#include "quant/q4.h"

namespace nibble {
namespace {

constexpr std::string_view kWeight = ".weight";

std::vector<std::string_view> split(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool is_number(std::string_view part) {
  return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
}

// What a quantized checkpoint's tensors are called, of all formats that we know.
bool names_quantized(std::string_view name) {
  constexpr std::array<std::string_view, 12> kEndings = {
      ".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".weight_packed", ".weight_q4", ".qweight",
      ".scales",       ".weight_shape",   "_proj_blocks",      "_proj_scales",   ".qzeros",    ".absmax"};
  return std::any_of(kEndings.begin(), kEndings.end(),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

bool is_plain_float(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
}

// [E, K, N] of gpt-oss, or [E, ...] of a family whose order of axes we do not know.
bool is_stacked_experts(const TensorInfo& tensor) {
  if (tensor.shape.size() != 3) return false;
  const std::vector<std::string_view> parts = split(tensor.name);
  return std::find(parts.begin(), parts.end(), "experts") != parts.end() &&
         tensor.name.find("_proj") != std::string::npos;
}

Status already_quantized(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  return user_error("{}: already quantized: tensor {} is {} {}; wanted BF16, F16 or F32 weights",
                    checkpoint.directory(), quoted_name(tensor.name), dtype_name(tensor.dtype),
                    format_shape(tensor.shape));
}

TensorInfo output(std::string name, DType dtype, std::vector<int64_t> shape) {
  TensorInfo info{.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
  // Never more than the source's bytes, which were checked.
  info.bytes = checked_product(info.shape).value() * dtype_bytes(dtype);
  return info;
}

// The tensors that replace the weight of an item, codes first.
std::vector<TensorInfo> outputs_of(const QuantizeItem& item, QuantizeType type) {
  const int64_t n = item.n, k = item.k, groups = k / quantize_group(type);
  if (item.kind == QuantizeItem::Kind::kStacked) {
    const StackedNames names(item.source->name);
    return {output(names.blocks, DType::kU8, {item.slices, n, groups, mxfp4::kGroup / 2}),
            output(names.scales, DType::kU8, {item.slices, n, groups})};
  }
  const std::string& weight = item.source->name;  // ends in ".weight"
  switch (type) {
    case QuantizeType::kNvfp4:
      return {output(weight, DType::kU8, {n, k / 2}), output(weight + "_scale", DType::kF8E4M3, {n, groups}),
              output(weight + "_scale_2", DType::kF32, {})};
    case QuantizeType::kMxfp4:
      return {output(weight + "_packed", DType::kU8, {n, k / 2}),
              output(weight + "_scale", DType::kU8, {n, groups})};
    case QuantizeType::kQ4:
      return {output(weight + "_q4", DType::kU32, {n, groups, 4}),
              output(weight + "_scale", DType::kF16, {n, groups})};
  }
  NIBBLE_CHECK(false);
}

// By place in the source, so that a disk reads forward.
std::vector<const TensorInfo*> in_file_order(const Checkpoint& checkpoint) {
  std::vector<const TensorInfo*> tensors = checkpoint.tensors();
  std::sort(tensors.begin(), tensors.end(), [&](const TensorInfo* a, const TensorInfo* b) {
    const int files = checkpoint.file_of(a->name).compare(checkpoint.file_of(b->name));
    return files != 0 ? files < 0 : std::tie(a->begin, a->name) < std::tie(b->begin, b->name);
  });
  return tensors;
}

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, QuantizeWhat what, int64_t max_shard_bytes, QuantizePlan& plan)
      : checkpoint_(checkpoint), what_(what), max_shard_bytes_(max_shard_bytes), plan_(plan) {}

  Status add(const TensorInfo& tensor) {
    NIBBLE_ASSIGN_OR_RETURN(QuantizeItem item, decide(tensor));
    item.source = &tensor;
    std::vector<TensorInfo> outputs;
    if (item.kind == QuantizeItem::Kind::kCopy) {
      outputs.push_back(output(tensor.name, tensor.dtype, tensor.shape));
      if (tensor.shape.size() == 2 && tensor.name.ends_with(kWeight)) {
        plan_.unquantized_modules.push_back(tensor.name.substr(0, tensor.name.size() - kWeight.size()));
      }
    } else {
      outputs = outputs_of(item, plan_.type);
      ++plan_.quantized;
    }
    int64_t bytes = 0;
    for (const TensorInfo& info : outputs) {
      bytes += info.bytes;
      if (!names_.insert(info.name).second) {
        return user_error("{}: tensor {}: its name is taken by another's 4-bit form",
                          checkpoint_.file_of(tensor.name), quoted_name(info.name));
      }
    }
    if (plan_.shards.empty() || (shard_bytes_ > 0 && shard_bytes_ + bytes > max_shard_bytes_)) {
      plan_.shards.emplace_back();
      shard_bytes_ = 0;
    }
    ShardPlan& shard = plan_.shards.back();
    shard_bytes_ += bytes;
    shard.source_bytes += tensor.bytes;
    plan_.source_bytes += tensor.bytes;
    item.first_output = shard.tensors.size();
    shard.items.push_back(item);
    std::move(outputs.begin(), outputs.end(), std::back_inserter(shard.tensors));
    return {};
  }

 private:
  Result<QuantizeItem> decide(const TensorInfo& tensor) {
    if (names_quantized(tensor.name)) return already_quantized(checkpoint_, tensor);
    QuantizeItem item;
    if (is_stacked_experts(tensor)) {
      if (!plan_.gpt_oss) {
        return user_error(
            "{}: tensor {} {}: experts stacked in one tensor are understood of gpt_oss only; wanted one "
            "tensor an expert",
            checkpoint_.file_of(tensor.name), quoted_name(tensor.name), format_shape(tensor.shape));
      }
      item = {.kind = QuantizeItem::Kind::kStacked,
              .slices = tensor.shape[0],
              .n = tensor.shape[2],
              .k = tensor.shape[1]};
    } else if (tensor.shape.size() == 2 && wants_quantization(tensor.name, what_)) {
      item = {.kind = QuantizeItem::Kind::kMatrix, .n = tensor.shape[0], .k = tensor.shape[1]};
    } else {
      return item;
    }
    if (!is_plain_float(tensor.dtype)) return already_quantized(checkpoint_, tensor);
    if (item.k % quantize_group(plan_.type) == 0 && tensor.bytes > 0) return item;
    if (item.kind == QuantizeItem::Kind::kStacked) {
      return user_error("{}: tensor {} {}: wanted a middle size that is a multiple of {}",
                        checkpoint_.file_of(tensor.name), quoted_name(tensor.name),
                        format_shape(tensor.shape), quantize_group(plan_.type));
    }
    plan_.kept.push_back(tensor.name);
    return QuantizeItem{};
  }

  const Checkpoint& checkpoint_;
  const QuantizeWhat what_;
  const int64_t max_shard_bytes_;
  QuantizePlan& plan_;
  std::set<std::string> names_;
  int64_t shard_bytes_ = 0;
};

}  // namespace

int64_t quantize_group(QuantizeType type) {
  switch (type) {
    case QuantizeType::kNvfp4:
      return nvfp4::kGroup;
    case QuantizeType::kMxfp4:
      return mxfp4::kGroup;
    case QuantizeType::kQ4:
      return q4::kGroup;
  }
  NIBBLE_CHECK(false);
}

bool wants_quantization(const std::string& tensor, QuantizeWhat what) {
  if (!tensor.ends_with(kWeight)) return false;
  std::vector<std::string_view> parts = split(tensor);
  parts.pop_back();  // "weight"
  // Towers of other modalities have feed-forwards with the names of the language model's.
  constexpr std::array<std::string_view, 7> kOtherTowers = {
      "visual", "vision", "vision_tower", "vision_model", "audio", "audio_tower", "multi_modal_projector"};
  bool in_block = false;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string_view part = parts[i];
    if (std::find(kOtherTowers.begin(), kOtherTowers.end(), part) != kOtherTowers.end()) return false;
    if (part == "experts" && i + 2 < parts.size() && is_number(parts[i + 1])) return true;
    if (part == "gate" || part.find("router") != std::string_view::npos || part.starts_with("embed") ||
        part == "lm_head" || part.find("norm") != std::string_view::npos || part == "indexer") {
      return false;
    }
    in_block = in_block || part == "mlp" || part.find("attn") != std::string_view::npos ||
               part.find("attention") != std::string_view::npos || part.starts_with("shared_expert") ||
               part == "feed_forward" || part == "block_sparse_moe";
  }
  if (what == QuantizeWhat::kExperts || !in_block || parts.size() < 2) return false;
  const std::string_view leaf = parts.back();
  return leaf.find("_proj") != std::string_view::npos || leaf == "w1" || leaf == "w2" || leaf == "w3";
}

Result<QuantizePlan> plan_quantization(const Checkpoint& checkpoint, const nlohmann::ordered_json& config,
                                       QuantizeType type, QuantizeWhat what, int64_t max_shard_bytes) {
  QuantizePlan plan;
  plan.type = type;
  const auto family = config.find("model_type");
  plan.gpt_oss = family != config.end() && *family == "gpt_oss";
  if (plan.gpt_oss && (type != QuantizeType::kMxfp4 || what != QuantizeWhat::kExperts)) {
    return user_error("{}: gpt_oss has a 4-bit layout for --type mxfp4 --what experts only, not for {} {}",
                      checkpoint.directory(), quantize_type_name(type), quantize_what_name(what));
  }
  Planner planner(checkpoint, what, max_shard_bytes, plan);
  for (const TensorInfo* tensor : in_file_order(checkpoint)) NIBBLE_RETURN_IF_ERROR(planner.add(*tensor));

  if (plan.quantized == 0 && !plan.kept.empty()) {
    return user_error(
        "{}: nothing to quantize: no weight has columns in multiples of {} (the first is {} {})",
        checkpoint.directory(), quantize_group(type), quoted_name(plan.kept.front()),
        format_shape(checkpoint.info(plan.kept.front())->shape));
  }
  if (plan.quantized == 0) {
    return user_error(
        "{}: nothing to quantize: no tensor is {}", checkpoint.directory(),
        what == QuantizeWhat::kExperts
            ? "called ....experts.<number>.....weight (--what all-linear takes dense layers too)"
            : "a linear layer of attention or feed-forward by its name");
  }
  std::sort(plan.unquantized_modules.begin(), plan.unquantized_modules.end());
  for (size_t i = 0; i < plan.shards.size(); ++i)
    plan.shards[i].file_name = shard_file_name(i, plan.shards.size());
  return plan;
}

}  // namespace nibble
