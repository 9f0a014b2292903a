#include "model/decoder.h"

#include <algorithm>

#include "base/numbers.h"
#include "model/ffn.h"
#include "model/gqa.h"

namespace nibble {
namespace {

std::vector<KvLayerShape> kv_shapes(const ModelSpec& spec) {
  std::vector<KvLayerShape> shapes;
  for (const LayerSpec& layer : spec.layers) {
    shapes.push_back({layer.attention.kv_heads, layer.attention.head_dim, layer.attention.window});
  }
  return shapes;
}

}  // namespace

Result<int64_t> Decoder::plan_bytes(const ModelSpec& spec, const DecoderOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(int64_t kv_bytes, KvCache::plan_bytes(kv_shapes(spec), options.kv));
  NIBBLE_ASSIGN_OR_RETURN(int64_t activation_bytes,
                          ActivationMemory::plan_bytes(spec, options.max_rows, options.max_logit_rows));
  std::optional<int64_t> total = checked_add(kv_bytes, activation_bytes);
  if (!total) return user_error("KV cache and activations do not fit in 64 bits");
  return *total;
}

Result<std::unique_ptr<Decoder>> Decoder::create(Ops& ops, ModelSpec spec, ModelWeights weights,
                                                 const DecoderOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(KvCache kv, KvCache::create(ops.memory(), kv_shapes(spec), options.kv));
  NIBBLE_ASSIGN_OR_RETURN(
      ActivationMemory activations,
      ActivationMemory::allocate(ops.memory(), spec, options.max_rows, options.max_logit_rows));
  return std::unique_ptr<Decoder>(
      new Decoder(ops, std::move(spec), std::move(weights), options, std::move(kv), std::move(activations)));
}

Decoder::Decoder(Ops& ops, ModelSpec spec, ModelWeights weights, const DecoderOptions& options, KvCache kv,
                 ActivationMemory activations)
    : ops_(ops),
      spec_(std::move(spec)),
      weights_(std::move(weights)),
      options_(options),
      kv_(std::move(kv)),
      activations_(std::move(activations)) {
  for (const RopeSpec& rope : spec_.ropes) rope_factors_.push_back(rope_frequencies(rope).attention_factor);
}

Status Decoder::check(std::span<const SequenceStep> steps) const {
  int64_t rows = 0, logit_rows = 0;
  for (const SequenceStep& step : steps) {
    const int64_t count = static_cast<int64_t>(step.ids.size());
    NIBBLE_CHECK(count > 0);
    for (int32_t id : step.ids) {
      if (id < 0 || id >= spec_.vocab)
        return user_error("token id {} is outside the vocabulary of {}", id, spec_.vocab);
    }
    rows += count;
    logit_rows += step.logits == WantLogits::kAll ? count : step.logits == WantLogits::kLast ? 1 : 0;
  }
  if (rows > options_.max_rows || logit_rows > options_.max_logit_rows) {
    return user_error("a step of {} rows and {} rows of logits is over its limits of {} and {}", rows,
                      logit_rows, options_.max_rows, options_.max_logit_rows);
  }
  return {};
}

Result<Rows<const float>> Decoder::forward(std::span<const SequenceStep> steps, const Trace* trace) {
  NIBBLE_RETURN_IF_ERROR(check(steps));
  ids_.clear();
  positions_.clear();
  slots_.clear();
  logit_rows_.clear();
  std::vector<KvCache::Extension> extensions;
  for (const SequenceStep& step : steps) {
    const int64_t start = kv_.length(step.slot), count = static_cast<int64_t>(step.ids.size());
    for (int64_t i = 0; i < count; ++i) {
      if (step.logits == WantLogits::kAll || (step.logits == WantLogits::kLast && i + 1 == count)) {
        logit_rows_.push_back(static_cast<int32_t>(ids_.size()));
      }
      ids_.push_back(step.ids[static_cast<size_t>(i)]);
      positions_.push_back(static_cast<int32_t>(start + i));
      slots_.push_back(step.slot);
    }
    extensions.push_back({step.slot, count});
  }
  NIBBLE_RETURN_IF_ERROR(kv_.extend(extensions));

  const int64_t rows = static_cast<int64_t>(ids_.size()),
                logit_rows = static_cast<int64_t>(logit_rows_.size());
  Step step{.ops = ops_,
            .spec = spec_,
            .kv = kv_,
            .act = activations_.views(rows, logit_rows),
            .rows = {},
            .trace = trace};
  Activations& act = step.act;
  const int64_t index_bytes = rows * static_cast<int64_t>(sizeof(int32_t));
  ops_.memory().upload(act.ids.data, ids_.data(), index_bytes);
  ops_.memory().upload(act.positions.data, positions_.data(), index_bytes);
  ops_.memory().upload(act.slots.data, slots_.data(), index_bytes);
  step.rows = {.count = rows, .positions_T = act.positions.data, .slots_T = act.slots.data};

  run_layers(step);

  ops_.gather(act.residual, logit_rows_, act.logit_inputs);
  ops_.rms_norm(act.logit_inputs, weights_.final_norm, spec_.norm_eps, act.logit_inputs);
  ops_.linear(act.logit_inputs, weights_.head, act.logits);
  host_logits_.resize(static_cast<size_t>(logit_rows * spec_.vocab));
  ops_.memory().download(host_logits_.data(), act.logits.data,
                         logit_rows * spec_.vocab * static_cast<int64_t>(sizeof(float)));
  return Rows<const float>(host_logits_.data(), logit_rows, spec_.vocab);
}

void Decoder::run_layers(Step& step) {
  Activations& act = step.act;
  auto show_hidden = [&](size_t layer) {
    if (step.trace != nullptr && step.trace->hidden) step.trace->hidden(layer, act.residual);
  };
  ops_.embed({act.ids.data, static_cast<size_t>(step.rows.count)}, weights_.embedding, act.residual);
  for (size_t i = 0; i < act.ropes.size(); ++i) {
    ops_.rope_table(step.rows.positions_T, weights_.rope_inv_freq[i], rope_factors_[i], act.ropes[i]);
  }
  show_hidden(0);
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    const LayerSpec& spec = spec_.layers[i];
    const LayerWeights& weights = weights_.layers[i];
    ops_.rms_norm(act.residual, weights.input_norm, spec_.norm_eps, act.normed);
    gqa(step, i, spec.attention, weights.attention);
    ops_.add(act.sublayer, act.residual);
    ops_.rms_norm(act.residual, weights.ffn_norm, spec_.norm_eps, act.normed);
    feed_forward(step, i, spec, weights.ffn);
    ops_.add(act.sublayer, act.residual);
    show_hidden(i + 1);
  }
}

}  // namespace nibble
