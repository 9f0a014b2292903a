#include "model/loaded_model.h"

namespace nibble {

Result<LoadedModel> load_model(const FileSystem& files, const std::string& directory, ModelSpec spec,
                               std::unique_ptr<Ops> ops, const DecoderOptions& options,
                               const LoadProgress& progress) {
  LoadedModel model;
  model.ops = std::move(ops);
  NIBBLE_RETURN_IF_ERROR(Decoder::plan_bytes(spec, options).status());
  NIBBLE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(files, directory));
  model.checkpoint = std::make_unique<Checkpoint>(std::move(checkpoint));
  NIBBLE_ASSIGN_OR_RETURN(ModelWeights weights,
                          load_weights(spec, *model.checkpoint, *model.ops, options.arithmetic, progress));
  NIBBLE_ASSIGN_OR_RETURN(model.decoder,
                          Decoder::create(*model.ops, std::move(spec), std::move(weights), options));
  return model;
}

}  // namespace nibble
