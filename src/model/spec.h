// ModelSpec: a model as data. A family file (families/) makes it from config.json; the forward pass, the
// weight loader and the memory plan read it and know no family.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "model/rope.h"
#include "ops/ops.h"

namespace nibble {

// Grouped-query attention. Head h reads key/value head h * kv_heads / heads.
struct AttentionSpec {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t window = 0;  // 0: full; else a position sees the last `window`, itself included
  size_t rope = 0;     // index into ModelSpec::ropes
  OutputGate output_gate = OutputGate::kNone;  // from the same normed input as q, k, v

  int64_t query_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t gate_width() const {
    return output_gate == OutputGate::kNone           ? 0
           : output_gate == OutputGate::kSoftplusHead ? heads
                                                      : query_width();
  }
};

struct MoeSpec {
  int64_t experts = 0;
  int64_t chosen = 0;        // experts a token
  int64_t width = 0;         // of a routed expert
  int64_t shared_width = 0;  // of the shared expert; 0: none
  RouterSpec router;
};

struct LayerSpec {
  AttentionSpec attention;
  int64_t dense_width = 0;     // feed-forward width of a dense layer
  std::optional<MoeSpec> moe;  // there in a sparse layer
};

// Where the tensors are on disk. A name of a layer is `layers` + number + "." + name.
struct TensorNames {
  std::string embedding = "model.embed_tokens";
  std::string final_norm = "model.norm.weight";
  std::string head = "lm_head";
  std::string layers = "model.layers.";
  std::string input_norm = "input_layernorm.weight";
  std::string ffn_norm = "post_attention_layernorm.weight";
  std::string query = "self_attn.q_proj", key = "self_attn.k_proj", value = "self_attn.v_proj";
  std::string output = "self_attn.o_proj", output_gate = "self_attn.g_proj";
  std::string query_norm = "self_attn.q_norm.weight", key_norm = "self_attn.k_norm.weight";
  std::string mlp = "mlp.";  // of gate_proj, up_proj, down_proj of a dense layer
  std::string router = "mlp.gate";
  std::string router_bias = "mlp.gate.e_score_correction_bias";
  std::string experts = "mlp.experts.";  // + number + "." + gate_proj ...
  std::string shared = "mlp.shared_expert.";
  std::string gate_proj = "gate_proj", up_proj = "up_proj", down_proj = "down_proj";
};

struct ModelSpec {
  std::string family;  // model_type
  int64_t width = 0;   // D
  int64_t vocab = 0;
  int64_t max_positions = 0;
  float norm_eps = 0;
  bool tied_head = false;
  Activation activation = Activation::kSilu;
  std::vector<RopeSpec> ropes;
  std::vector<LayerSpec> layers;
  TensorNames names;
  std::vector<int32_t> eos;
  std::vector<std::string> ignored_config_keys;  // keys of config.json that this family does not know
};

// Reads DIRECTORY/config.json with the family that its model_type names.
Result<ModelSpec> load_spec(const FileSystem& files, const std::string& directory);
Result<ModelSpec> parse_spec(std::string_view config_json, const std::string& name);

}  // namespace nibble
