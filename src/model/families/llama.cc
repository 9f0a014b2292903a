// Llama ("llama"), dense: so that small real models run too.
#include "model/families/families.h"
#include "model/limits.h"

namespace nibble {

ModelSpec llama_spec(Config config) {
  ModelSpec spec = read_common(config);
  config.only("mlp_bias", {false});
  config.ignore({"is_llama_config"});
  GqaSpec gqa = read_gqa(config, spec);
  gqa.qkv_bias = gqa.output_bias = config.boolean("attention_bias", false);
  check_heads(config, gqa, 0);
  spec.ropes = {read_model_rope(config, gqa.head_dim)};
  const int64_t width = config.integer("intermediate_size", 1, limits::kWidth);
  for (LayerSpec& layer : spec.layers) {
    layer.mixer = gqa;
    layer.dense_width = width;
  }
  return spec;
}

}  // namespace nibble
