#include "model/gguf_weights.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "base/numbers.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/stacked_names.h"

namespace nibble {
namespace {

struct NamePair {
  std::string_view ours, gguf;
};

constexpr std::array kModelNames = {
    NamePair{"model.embed_tokens", "token_embd"},
    NamePair{"model.norm", "output_norm"},
    NamePair{"lm_head", "output"},
};

// Behind "model.layers.N." and "blk.N.".
constexpr std::array kLayerNames = {
    NamePair{"input_layernorm", "attn_norm"},    NamePair{"self_attn.q_proj", "attn_q"},
    NamePair{"self_attn.k_proj", "attn_k"},      NamePair{"self_attn.v_proj", "attn_v"},
    NamePair{"self_attn.o_proj", "attn_output"}, NamePair{"self_attn.g_proj", "attn_gate"},
    NamePair{"self_attn.q_norm", "attn_q_norm"}, NamePair{"self_attn.k_norm", "attn_k_norm"},
    NamePair{"self_attn.sinks", "attn_sinks"},   NamePair{"mlp.gate_proj", "ffn_gate"},
    NamePair{"mlp.up_proj", "ffn_up"},           NamePair{"mlp.down_proj", "ffn_down"},
};

std::optional<std::string_view> strip_front(std::string_view text, std::string_view front) {
  if (!text.starts_with(front)) return std::nullopt;
  return text.substr(front.size());
}

std::optional<std::string_view> strip_back(std::string_view text, std::string_view back) {
  if (!text.ends_with(back)) return std::nullopt;
  return text.substr(0, text.size() - back.size());
}

// The number at the front of "17.REST", and REST.
std::optional<std::pair<int64_t, std::string_view>> split_number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data() + text.size() || *end != '.') return std::nullopt;
  return std::pair(number, text.substr(static_cast<size_t>(end - text.data()) + 1));
}

std::optional<std::string_view> find_name(std::span<const NamePair> names, std::string_view ours) {
  for (const NamePair& pair : names) {
    if (pair.ours == ours) return pair.gguf;
  }
  return std::nullopt;
}

// gate, up or down by what the family calls them.
std::string_view projection(const TensorNames& names, std::string_view name) {
  return name == names.gate_proj ? "gate" : name == names.up_proj ? "up" : "down";
}

// The half of gpt-oss's parameter that is a tensor of its own here.
std::string_view stacked_projection(std::string_view name, RowSplit split) {
  if (name.ends_with(kStackedDown)) return "down";
  return split == RowSplit::kEven ? "gate" : "up";
}

}  // namespace

GgufWeights::GgufWeights(std::shared_ptr<Gguf> gguf, const ModelSpec& spec)
    : gguf_(std::move(gguf)), names_(spec.names) {
  for (const LayerSpec& layer : spec.layers) {
    if (layer.moe) experts_ = layer.moe->experts;
  }
  for (const std::string& prefix : names_.ignored_prefixes) {
    if (const auto number = strip_front(prefix, names_.layers))
      ignored_blocks_.push_back(fmt::format("blk.{}", *number));
  }
  for (const GgufTensorInfo* tensor : gguf_->tensors()) {
    if (is_ignored(tensor->name)) gguf_->ignore(tensor->name);
  }
}

bool GgufWeights::is_ignored(const std::string& tensor) const {
  return std::ranges::any_of(ignored_blocks_,
                             [&](const std::string& block) { return tensor.starts_with(block); });
}

GgufWeights::Place GgufWeights::place_of(const std::string& module) const {
  if (const auto top = find_name(kModelNames, module)) return {std::string(*top), {}};
  const auto in_layers = strip_front(module, names_.layers);
  const auto layer = in_layers ? split_number(*in_layers) : std::nullopt;
  if (!layer) return {module, {}};
  const auto [number, name] = *layer;
  const auto at = [&, n = number](std::string_view gguf) { return fmt::format("blk.{}.{}", n, gguf); };
  if (const auto known = find_name(kLayerNames, name)) return {at(*known), {}};
  if (name == "post_attention_layernorm") {
    // The norm before the feed-forward: architectures call it by either name.
    return {at(gguf_->has(at("ffn_norm.weight")) ? "ffn_norm" : "post_attention_norm"), {}};
  }
  if (name == names_.router) return {at("ffn_gate_inp"), {}};
  if (const auto shared = strip_front(name, names_.shared))
    return {at(fmt::format("ffn_{}_shexp", projection(names_, *shared))), {}};
  if (const auto experts = strip_front(name, names_.experts)) {
    if (const auto expert = split_number(*experts))
      return {at(fmt::format("ffn_{}_exps", projection(names_, expert->second))), expert->first};
  }
  return {module, {}};
}

std::string GgufWeights::tensor_of(const std::string& name) const {
  if (name == names_.rope_divisors) return name;
  if (name.ends_with(names_.router_bias)) {
    const std::string block = name.substr(0, name.size() - names_.router_bias.size());
    // "blk.N." of any module of the layer.
    const std::string base = place_of(block + "input_layernorm").base;
    return base.substr(0, base.rfind('.') + 1) + "exp_probs_b.bias";
  }
  for (const std::string_view end : {".weight", ".bias"}) {
    if (const auto module = strip_back(name, end))
      return fmt::format("{}{}", place_of(std::string(*module)).base, end);
  }
  return place_of(name).base + ".weight";
}

bool GgufWeights::has(const std::string& name) const { return gguf_->has(tensor_of(name)); }
void GgufWeights::ignore(const std::string& name) { gguf_->ignore(tensor_of(name)); }
const std::string& GgufWeights::file_of(const std::string& name) const {
  return gguf_->file_of(gguf_->has(name) ? name : tensor_of(name));
}

std::vector<StoredTensor> GgufWeights::stored() const {
  std::vector<StoredTensor> all;
  for (const GgufTensorInfo* tensor : gguf_->tensors()) {
    if (is_ignored(tensor->name)) continue;
    all.push_back({.name = tensor->name,
                   .dtype = tensor->type->name,
                   .format = tensor->type->name,
                   .matrix = tensor->type->readable
                                 ? std::optional(gguf_matrix_format(GgufType{tensor->type->id}))
                                 : std::nullopt,
                   .shape = tensor->shape,
                   .bytes = tensor->bytes});
  }
  return all;
}

Result<std::vector<float>> GgufWeights::floats(const std::string& name, std::span<const int64_t> shape) {
  return gguf_->floats(tensor_of(name), shape);
}

Result<Matrix> GgufWeights::matrix(const std::string& prefix, int64_t n, int64_t k) {
  return matrix_at(place_of(prefix), experts_, n, k);
}

Result<Matrix> GgufWeights::matrix_at(const Place& place, int64_t experts, int64_t n, int64_t k) {
  const std::string name = place.base + ".weight";
  std::vector<int64_t> shape = {n, k};
  if (place.expert) shape.insert(shape.begin(), experts);
  NIBBLE_ASSIGN_OR_RETURN(const GgufTensorView view, gguf_->tensor(name, shape));
  const GgufTypeInfo& type = *view.info->type;
  const int64_t blocks = n * (k / type.block_values);
  const auto* codes = reinterpret_cast<const uint8_t*>(view.bytes.data()) +
                      place.expert.value_or(0) * blocks * type.block_bytes;
  if (const auto bad = find_bad_gguf_scale(view.type(), codes, blocks)) {
    const int64_t row_blocks = k / type.block_values;
    return user_error("{}: tensor {}{}: the scale of row {}, columns from {} is NaN or infinite",
                      gguf_->file_of(name), quoted_name(name),
                      place.expert ? fmt::format(", expert {}", *place.expert) : "", *bad / row_blocks,
                      *bad % row_blocks * type.block_values);
  }
  Matrix matrix{.format = gguf_matrix_format(view.type()), .n = n, .k = k, .codes = codes};
  if (view.type() != GgufType::kNvfp4) return matrix;
  NIBBLE_ASSIGN_OR_RETURN(matrix.tensor_scale, scale_at(place, ".scale", experts, matrix.tensor_scale));
  NIBBLE_ASSIGN_OR_RETURN(matrix.input_scale, scale_at(place, ".input_scale", experts, matrix.input_scale));
  return matrix;
}

Result<float> GgufWeights::scale_at(const Place& place, const std::string& end, int64_t experts,
                                    float otherwise) {
  const std::string name = place.base + end;
  if (!gguf_->has(name)) return otherwise;
  const std::array<int64_t, 1> shape = {place.expert ? experts : 1};
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<float> scales, gguf_->floats(name, shape));
  const float scale = scales[static_cast<size_t>(place.expert.value_or(0))];
  if (scale >= 0) return scale;
  return user_error("{}: tensor {}: wanted values of at least 0, found {}", gguf_->file_of(name),
                    quoted_name(name), scale);
}

Result<std::vector<Matrix>> GgufWeights::stacked(const std::string& name, int64_t experts, int64_t n,
                                                 int64_t k, RowSplit split) {
  // Any expert's module of the layer tells the layer.
  const std::string layer = name.substr(0, name.rfind('.'));
  Place place = place_of(layer + ".0.any");
  place.base = fmt::format("{}ffn_{}_exps", place.base.substr(0, place.base.rfind('.') + 1),
                           stacked_projection(name, split));
  std::vector<Matrix> matrices(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) {
    place.expert = e;
    NIBBLE_ASSIGN_OR_RETURN(matrices[static_cast<size_t>(e)], matrix_at(place, experts, n, k));
  }
  return matrices;
}

Result<std::vector<float>> GgufWeights::stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                                     RowSplit split) {
  const Place place = place_of(name.substr(0, name.rfind('.')) + ".0.any");
  const std::array<int64_t, 2> shape = {experts, n};
  return gguf_->floats(fmt::format("{}ffn_{}_exps.bias", place.base.substr(0, place.base.rfind('.') + 1),
                                   stacked_projection(name, split)),
                       shape);
}

}  // namespace nibble
