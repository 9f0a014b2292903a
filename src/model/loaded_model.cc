#include "model/loaded_model.h"

namespace nibble {

Result<LoadedModel> load_model(std::unique_ptr<WeightSource> source, ModelSpec spec, std::unique_ptr<Ops> ops,
                               const DecoderOptions& options, const LoadProgress& progress) {
  LoadedModel model;
  model.ops = std::move(ops);
  model.weights = std::move(source);
  NIBBLE_RETURN_IF_ERROR(Decoder::plan_bytes(spec, options).status());
  NIBBLE_ASSIGN_OR_RETURN(ModelWeights weights,
                          load_weights(spec, *model.weights, *model.ops, options.arithmetic, progress));
  model.weights->release([&](MatrixFormat format) { return model.ops->copies_weights(format); });
  NIBBLE_ASSIGN_OR_RETURN(model.decoder,
                          Decoder::create(*model.ops, std::move(spec), std::move(weights), options));
  return model;
}

}  // namespace nibble
