// ModelSpec: a model as data. A family file (families/) makes it from config.json; the forward pass, the
// weight loader and the memory plan read it and know no family.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "model/rope.h"
#include "ops/ops.h"

namespace nibble {

// RMSNorm of queries and keys before RoPE.
enum class QkNorm {
  kNone,
  kHead,  // over each head, weight [head_dim]
  kFull,  // over all heads at once, weight [heads * head_dim]
};

// Grouped-query attention. Head h reads key/value head h * kv_heads / heads.
struct GqaSpec {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t window = 0;  // 0: full; else a position sees the last `window`, itself included
  size_t rope = 0;     // index into ModelSpec::ropes
  RopeStyle rope_style = RopeStyle::kHalves;
  QkNorm qk_norm = QkNorm::kNone;
  bool qkv_bias = false, output_bias = false;
  bool sinks = false;                          // a learned logit a head that joins the softmax denominator
  OutputGate output_gate = OutputGate::kNone;  // from the same normed input as q, k, v

  int64_t query_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t gate_width() const {
    return output_gate == OutputGate::kNone           ? 0
           : output_gate == OutputGate::kSoftplusHead ? heads
                                                      : query_width();
  }
};

// Chooses what an MLA layer attends to (DeepSeek sparse attention with pools; spec models.md 1).
struct IndexerSpec {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t pool = 1;   // tokens of a pool
  int64_t top_k = 0;  // tokens that a query may choose, a multiple of pool

  int64_t query_width() const { return heads * head_dim; }
  int64_t most_chosen() const { return top_k + pool - 1; }  // with the query's own, incomplete pool
};

// Multi-head latent attention: all heads share one latent of kv_rank elements a position.
struct MlaSpec {
  int64_t heads = 0;
  int64_t q_rank = 0;  // 0: queries come straight from the input
  int64_t kv_rank = 0;
  int64_t nope_dim = 0;   // of a head's query and key, without position
  int64_t rope_dim = 0;   // with position; 0: none
  int64_t value_dim = 0;  // of a head
  size_t rope = 0;        // index into ModelSpec::ropes, where rope_dim > 0
  RopeStyle rope_style = RopeStyle::kHalves;
  float scale = 1;  // on q . k
  std::optional<IndexerSpec> indexer;
  bool shares_selection = false;  // attends to what the MLA layer before it chose

  int64_t query_dim() const { return nope_dim + rope_dim; }
  int64_t latent_dim() const { return kv_rank + rope_dim; }  // what the cache holds for a position
};

// Kimi delta attention: a linear-attention layer with a decay a channel (spec models.md 1).
struct KdaSpec {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t taps = 4;                       // of the causal convolution before it
  std::optional<float> gate_lower_bound;  // absent: decay by softplus

  int64_t width() const { return heads * head_dim; }
};

using MixerSpec = std::variant<GqaSpec, MlaSpec, KdaSpec>;

struct MoeSpec {
  int64_t experts = 0;
  int64_t chosen = 0;        // experts a token
  int64_t width = 0;         // of a routed expert
  int64_t shared_width = 0;  // of the shared expert; 0: none
  RouterSpec router;
  bool router_bias_required = false;  // the checkpoint must hold it
  bool router_logit_bias = false;     // added to the logits themselves (gpt-oss)
  bool biases = false;                // of the experts' matrices
  bool stacked = false;  // one tensor of all experts on disk, gate and up rows interleaved (gpt-oss)
};

struct LayerSpec {
  MixerSpec mixer;
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
  std::string attention = "self_attn.";  // + q_proj ...
  std::string mlp = "mlp.";              // of a dense layer: + gate_proj ...
  std::string router = "mlp.gate";
  std::string router_bias = "mlp.gate.e_score_correction_bias";
  std::string experts = "mlp.experts.";  // + number + "." + gate_proj ...
  std::string shared = "mlp.shared_experts.";
  std::string gate_proj = "gate_proj", up_proj = "up_proj", down_proj = "down_proj";  // of experts
  std::string rope_divisors;  // [rotary_dim / 2], where there is such a tensor; empty: there is none
  // Tensors that are not for the forward pass of text: names that start so are passed over.
  std::vector<std::string> ignored_prefixes;
};

struct ModelSpec {
  std::string family;  // model_type
  int64_t width = 0;   // D
  int64_t vocab = 0;
  int64_t max_positions = 0;
  float norm_eps = 0;
  bool tied_head = false;
  ActivationSpec activation;
  std::optional<HyperSpec> hyper;
  std::vector<RopeSpec> ropes;
  std::vector<LayerSpec> layers;
  TensorNames names;
  std::vector<int32_t> eos;
  std::vector<std::string> ignored_config_keys;  // keys of config.json that this family does not know

  int64_t residual_width() const { return hyper ? hyper->streams * width : width; }
};

// Reads DIRECTORY/config.json with the family that its model_type names.
Result<ModelSpec> load_spec(const FileSystem& files, const std::string& directory);
Result<ModelSpec> parse_spec(std::string_view config_json, const std::string& name);
// The same of what is read already.
Result<ModelSpec> spec_of(Config config);

}  // namespace nibble
