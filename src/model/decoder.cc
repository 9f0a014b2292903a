#include "model/decoder.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "base/numbers.h"
#include "model/ffn.h"
#include "model/mixers.h"

namespace nibble {
namespace {

// What the whole model keeps for a sequence, and where in it each layer finds its own.
struct CacheLayout {
  std::vector<KvLayerShape> kv;
  std::vector<int64_t> states;
  std::vector<LayerCache> layers;
};

CacheLayout cache_layout(const ModelSpec& spec) {
  CacheLayout layout;
  for (const LayerSpec& layer : spec.layers) {
    LayerCache& own = layout.layers.emplace_back();
    const MixerCacheShape shape = mixer_cache(layer.mixer);
    for (const KvLayerShape& kv : shape.kv) {
      own.kv.push_back(layout.kv.size());
      layout.kv.push_back(kv);
    }
    for (int64_t elements : shape.states) {
      own.states.push_back(layout.states.size());
      layout.states.push_back(elements);
    }
  }
  return layout;
}

}  // namespace

Result<int64_t> Decoder::plan_bytes(const ModelSpec& spec, const DecoderOptions& options) {
  const CacheLayout layout = cache_layout(spec);
  NIBBLE_ASSIGN_OR_RETURN(int64_t kv_bytes, KvCache::plan_bytes(layout.kv, layout.states, options.kv));
  NIBBLE_ASSIGN_OR_RETURN(int64_t activation_bytes,
                          ActivationMemory::plan_bytes(spec, options.max_rows, options.max_logit_rows));
  std::optional<int64_t> total = checked_add(kv_bytes, activation_bytes);
  if (!total) return user_error("KV cache and activations do not fit in 64 bits");
  return *total;
}

StepShape Decoder::largest_step(const ModelSpec& spec, const DecoderOptions& options) {
  StepShape step{.rows = options.max_rows,
                 .logit_rows = options.max_logit_rows,
                 .vocab = spec.vocab,
                 .positions = round_up(options.kv.max_tokens, options.kv.page_tokens),
                 .widest = spec.residual_width()};
  int64_t most_chosen = 0;  // all selections have the room of the largest
  for (const LayerSpec& layer : spec.layers) {
    const auto* mla = std::get_if<MlaSpec>(&layer.mixer);
    if (mla == nullptr || !mla->indexer) continue;
    most_chosen = std::max(most_chosen, mla->indexer->most_chosen());
    step.pool = step.pool == 0 ? mla->indexer->pool : std::min(step.pool, mla->indexer->pool);
  }
  for (const LayerSpec& layer : spec.layers) {
    for (int64_t width : mixer_scratch(layer.mixer)) step.widest = std::max(step.widest, width);
    step.widest = std::max(step.widest, layer.dense_width);
    if (std::optional<StepShape::Attention> attention = mixer_attention(layer.mixer)) {
      const auto* mla = std::get_if<MlaSpec>(&layer.mixer);
      if (mla != nullptr && (mla->indexer || mla->shares_selection)) attention->chosen = most_chosen;
      step.attention.push_back(*attention);
    }
    if (!layer.moe) continue;
    step.widest = std::max(step.widest, layer.moe->shared_width);
    step.experts.push_back({.count = layer.moe->experts,
                            .chosen = layer.moe->chosen,
                            .model = spec.width,
                            .width = layer.moe->width});
  }
  return step;
}

Result<std::unique_ptr<Decoder>> Decoder::create(Ops& ops, ModelSpec spec, ModelWeights weights,
                                                 const DecoderOptions& options) {
  const CacheLayout layout = cache_layout(spec);
  NIBBLE_ASSIGN_OR_RETURN(KvCache kv, KvCache::create(ops.memory(), layout.kv, layout.states, options.kv));
  NIBBLE_ASSIGN_OR_RETURN(
      ActivationMemory activations,
      ActivationMemory::allocate(ops.memory(), spec, options.max_rows, options.max_logit_rows));
  return std::unique_ptr<Decoder>(
      new Decoder(ops, std::move(spec), std::move(weights), options, std::move(kv), std::move(activations)));
}

uint64_t Decoder::next_id() {
  static std::atomic<uint64_t> next{0};
  return next++;
}

Decoder::Decoder(Ops& ops, ModelSpec spec, ModelWeights weights, const DecoderOptions& options, KvCache kv,
                 ActivationMemory activations)
    : ops_(ops),
      spec_(std::move(spec)),
      weights_(std::move(weights)),
      options_(options),
      kv_(std::move(kv)),
      activations_(std::move(activations)),
      caches_(cache_layout(spec_).layers) {
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
  return run(steps, &Activations::logits, trace);
}

Result<Rows<const TokenLogit>> Decoder::forward_top(std::span<const SequenceStep> steps, const Trace* trace) {
  return run(steps, &Activations::top_logits, trace);
}

template <class T>
Result<Rows<const T>> Decoder::run(std::span<const SequenceStep> steps, Rows<T> Activations::*wanted,
                                   const Trace* trace) {
  NIBBLE_RETURN_IF_ERROR(check(steps));
  std::vector<int32_t> ids, positions, slots, wanted_rows;
  std::vector<KvCache::Extension> extensions;
  for (const SequenceStep& step : steps) {
    const int64_t start = kv_.length(step.slot), count = static_cast<int64_t>(step.ids.size());
    for (int64_t i = 0; i < count; ++i) {
      if (step.logits == WantLogits::kAll || (step.logits == WantLogits::kLast && i + 1 == count)) {
        wanted_rows.push_back(static_cast<int32_t>(ids.size()));
      }
      ids.push_back(step.ids[static_cast<size_t>(i)]);
      positions.push_back(static_cast<int32_t>(start + i));
      slots.push_back(step.slot);
    }
    extensions.push_back({step.slot, count});
  }
  const int64_t rows = std::ssize(ids), logit_rows = std::ssize(wanted_rows);
  Activations act = activations_.views(spec_, rows, logit_rows);
  const Rows<T>& on_device = act.*wanted;
  const int64_t logit_bytes = on_device.rows * on_device.cols * static_cast<int64_t>(sizeof(T));
  if (logit_bytes > host_logits_.bytes()) {
    host_logits_ = Buffer();
    NIBBLE_ASSIGN_OR_RETURN(host_logits_,
                            Buffer::allocate(ops_.memory().host_side(), logit_bytes, "logits on the host"));
  }
  NIBBLE_RETURN_IF_ERROR(kv_.extend(extensions));

  Step step{.ops = ops_,
            .spec = spec_,
            .kv = kv_,
            .act = act,
            .ids_T = act.indices.data,
            .logit_rows = {act.indices.data + 3 * rows, wanted_rows.size()},
            .rows = {.count = rows,
                     .positions_T = act.indices.data + rows,
                     .slots_T = act.indices.data + 2 * rows,
                     .one_a_sequence = rows == std::ssize(steps),
                     .one_sequence = steps.size() == 1},
            .arithmetic = options_.arithmetic,
            .trace = trace};
  std::vector<int32_t> indices = std::move(ids);  // as act.indices
  for (const std::vector<int32_t>* more : {&positions, &slots, &wanted_rows})
    indices.insert(indices.end(), more->begin(), more->end());
  ops_.memory().upload(act.indices.data, indices.data(),
                       static_cast<int64_t>(indices.size() * sizeof(int32_t)));

  // What a step computes depends on its contents, which operations with what shapes on its sizes alone: small
  // steps come again and again.
  constexpr int64_t kRepeatedRows = 64;
  constexpr bool kTop = std::is_same_v<T, TokenLogit>;
  auto work = [&] {
    run_layers(step);
    head(step);
    if (kTop) ops_.top_logits(act.logits, act.top_logits);
  };
  if (trace == nullptr && rows <= kRepeatedRows) {
    ops_.repeat(id_ << 32 | uint64_t{step.rows.one_a_sequence} << 31 | uint64_t{kTop} << 30 |
                    uint64_t{step.rows.one_sequence} << 29 | static_cast<uint64_t>(rows) << 16 |
                    static_cast<uint64_t>(logit_rows),
                work);
  } else {
    work();
  }
  ops_.memory().download(host_logits_.as<T>(), on_device.data, logit_bytes);
  return Rows<const T>(host_logits_.as<T>(), on_device.rows, on_device.cols);
}

void Decoder::head(Step& step) {
  Activations& act = step.act;
  ops_.gather(act.residual, step.logit_rows, act.logit_inputs);
  Rows<float> last = act.logit_inputs;
  if (spec_.hyper) {
    ops_.hyper_mean(*spec_.hyper, act.logit_inputs, act.logit_normed);
    last = act.logit_normed;
  }
  const Product logits[] = {{weights_.head, nullptr, act.logits}};
  ops_.norm_linears(last, weights_.final_norm, spec_.norm_eps, act.logit_normed, logits);
}

template <class Run>
void Decoder::sublayer(Step& step, const float* norm, const HyperWeights& hyper, Run run) {
  Activations& act = step.act;
  step.input_norm = norm;
  if (!spec_.hyper) {
    step.input = step.add_to = act.residual;
    return run();
  }
  const Product mix[] = {{hyper.mix, nullptr, act.mix}};
  ops_.norm_linears(act.residual, weights_.ones, spec_.norm_eps, act.normed_streams, mix);
  ops_.hyper_weights(*spec_.hyper, hyper.base, hyper.scale, act.mix);
  ops_.hyper_collect(*spec_.hyper, act.residual, act.mix, act.collected);
  step.input = act.collected;
  run();
  ops_.hyper_distribute(*spec_.hyper, act.sublayer, act.mix, act.residual);
}

void Decoder::run_layers(Step& step) {
  Activations& act = step.act;
  auto show_hidden = [&](size_t layer) {
    if (step.trace != nullptr && step.trace->hidden) step.trace->hidden(layer, act.residual);
  };
  // All streams start as the embedding.
  const int64_t streams = spec_.hyper ? spec_.hyper->streams : 1;
  auto stream = [&](int64_t s) {
    return Rows<float>(act.residual.data + s * spec_.width, act.residual.rows, spec_.width,
                       act.residual.stride);
  };
  ops_.embed({step.ids_T, static_cast<size_t>(step.rows.count)}, weights_.embedding, stream(0));
  for (int64_t s = 1; s < streams; ++s) ops_.copy(stream(0), stream(s));
  for (size_t i = 0; i < act.ropes.size(); ++i) {
    ops_.rope_table(step.rows.positions_T, weights_.rope_inv_freq[i], rope_factors_[i], act.ropes[i]);
  }
  show_hidden(0);
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    const LayerSpec& spec = spec_.layers[i];
    const LayerWeights& weights = weights_.layers[i];
    sublayer(step, weights.input_norm, weights.mixer_hyper,
             [&] { mix(step, caches_[i], spec.mixer, weights.mixer); });
    sublayer(step, weights.ffn_norm, weights.ffn_hyper, [&] { feed_forward(step, i, spec, weights.ffn); });
    show_hidden(i + 1);
  }
}

}  // namespace nibble
