// The model families: one file each, from config.json to a ModelSpec, and what several of them share.
#pragma once

#include "model/config.h"
#include "model/spec.h"

namespace nibble {

// What every family's config says in the same words: sizes, eps, vocabulary, ids, keys without effect on the
// result. `layers` has its final length and default entries.
ModelSpec read_common(Config& config);
// num_attention_heads, num_key_value_heads, head_dim (absent: width / heads), rope_interleaved.
GqaSpec read_gqa(Config& config, const ModelSpec& spec);
// Heads that do not divide into key/value heads are an error of the config.
void check_heads(Config& config, const GqaSpec& gqa, size_t layer);
// The latent that MLA caches is a key to every backend, and not longer than one may be.
void check_latent(Config& config, const MlaSpec& mla);
// The sigmoid router of DeepSeek-V3 and what follows it: selection bias, groups, renormalization, scale.
RouterSpec read_sigmoid_router(Config& config, int64_t experts);
// More experts a token than its groups hold are an error of the config.
void check_chosen(Config& config, const MoeSpec& moe);
// Routed experts behind that router, and shared ones beside them.
MoeSpec read_deepseek_moe(Config& config);
// The feed-forward of all layers: dense in the first first_k_dense_replace, then those experts.
void read_deepseek_ffn(Config& config, ModelSpec& spec);
// Layers of multi-token prediction stand behind the last layer and are not for plain decoding.
void ignore_next_token_layers(Config& config, ModelSpec& spec);

// A family reads every key that matters, refuses by `config.only` what it does not implement, and leaves
// errors in config.status().
ModelSpec deepseek_v3_spec(Config config);
ModelSpec glm4_moe_spec(Config config);
ModelSpec glm5_next_spec(Config config);
ModelSpec gpt_oss_spec(Config config);
ModelSpec laguna_spec(Config config);
ModelSpec llama_spec(Config config);
ModelSpec minimax_m2_spec(Config config);
ModelSpec mixtral_spec(Config config);
ModelSpec olmoe_spec(Config config);
ModelSpec qwen3_spec(Config config);
ModelSpec qwen3_moe_spec(Config config);

}  // namespace nibble
