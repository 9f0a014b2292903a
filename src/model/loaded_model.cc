#include "model/loaded_model.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "base/numbers.h"

namespace nibble {
namespace {

// Bytes of the weights that will be in memory beside the files: as the backend wants them, or as the source
// had to put them.
int64_t bytes_to_copy(const WeightSource& source, const TensorNames& names, const Ops& ops) {
  int64_t total = source.own_bytes();
  for (const StoredTensor& tensor : source.stored()) {
    const bool is_ignored = std::ranges::any_of(
        names.ignored_prefixes, [&](const std::string& prefix) { return tensor.name.starts_with(prefix); });
    if (!is_ignored && tensor.matrix && ops.copies_weights(*tensor.matrix))
      total = checked_add(total, tensor.bytes).value_or(INT64_MAX);
  }
  return total;
}

// Refuses what cannot fit before anything large is read. A model that lies in mapped files can run from them,
// its BF16 weights first; and one that the source puts into memory, from there.
Status plan_memory(const ModelSpec& spec, const WeightSource& source, Ops& ops,
                   const DecoderOptions& options) {
  MemoryPlan plan{.copies = bytes_to_copy(source, spec.names, ops), .most = ops.memory().most_bytes()};
  NIBBLE_ASSIGN_OR_RETURN(plan.working, Decoder::plan_bytes(spec, options));
  if (plan.working <= plan.most)  // and so its shapes are no numbers that overflow
    plan.working = checked_add(plan.working, ops.working_bytes(Decoder::largest_step(spec, options)))
                       .value_or(INT64_MAX);
  std::string wanted;
  switch (fit_of(plan)) {
    case MemoryFit::kAll:
      return {};
    case MemoryFit::kNothing:
      return user_error(
          "KV cache and activations: wanted {} of memory, but only {} is available; a smaller context (-c) "
          "or prefill chunk (--prefill-chunk) takes less",
          format_bytes(plan.working), format_bytes(plan.most));
    case MemoryFit::kNotWeights:
      wanted = fmt::format(
          "wanted {} of memory for weights and {} for KV cache and activations, but only {} is available",
          format_bytes(plan.copies), format_bytes(plan.working), format_bytes(plan.most));
  }
  const bool can_stay =
      source.is_mapped() || (source.own_bytes() > 0 && source.own_bytes() <= plan.most - plan.working);
  if (can_stay && ops.use_host_bf16()) {
    plan.copies = bytes_to_copy(source, spec.names, ops);
    if (fit_of(plan) == MemoryFit::kAll) return {};
  }
  if (!can_stay || !ops.use_host_weights()) return user_error("{}", wanted);
  log_warning("{}: weights stay in their files, which is slow (a smaller context, -c, leaves more)", wanted);
  return {};
}

// Matrices from which to tell how a whole model rounds: of the first, the middle and the last layer.
std::vector<Matrix> some_matrices(const ModelWeights& weights) {
  const size_t layers = weights.layers.size();
  std::vector<Matrix> some = {weights.head};
  for (size_t i : {size_t{0}, layers / 2, layers - 1}) {
    const LayerWeights& layer = weights.layers[i];
    some.push_back(std::visit([](const auto& mixer) { return mixer.output; }, layer.mixer));
    const ExpertWeights& ffn = layer.ffn.experts ? layer.ffn.experts->experts()[0] : layer.ffn.dense;
    some.insert(some.end(), {ffn.gate, ffn.down, layer.ffn.shared.down});
  }
  std::erase_if(some, [](const Matrix& m) { return m.empty(); });
  return some;
}

}  // namespace

MemoryFit fit_of(const MemoryPlan& plan) {
  if (plan.working > plan.most) return MemoryFit::kNothing;
  return plan.copies > plan.most - plan.working ? MemoryFit::kNotWeights : MemoryFit::kAll;
}

Result<LoadedModel> load_model(std::unique_ptr<WeightSource> source, ModelSpec spec, std::unique_ptr<Ops> ops,
                               const DecoderOptions& options, const LoadProgress& progress) {
  LoadedModel model;
  model.ops = std::move(ops);
  model.weights = std::move(source);
  NIBBLE_RETURN_IF_ERROR(plan_memory(spec, *model.weights, *model.ops, options));
  NIBBLE_ASSIGN_OR_RETURN(ModelWeights weights,
                          load_weights(spec, *model.weights, *model.ops, options.arithmetic, progress));
  if (model.ops->rounds_activations()) {
    model.rounding = measure_rounding(*model.ops, some_matrices(weights));
    log_info("activations are rounded: random products with the model's weights are off by {}",
             describe(model.rounding));
  }
  model.weights->release([&](MatrixFormat format) { return model.ops->copies_weights(format); });
  NIBBLE_ASSIGN_OR_RETURN(model.decoder,
                          Decoder::create(*model.ops, std::move(spec), std::move(weights), options));
  return model;
}

}  // namespace nibble
