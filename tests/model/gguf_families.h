// The six architectures: a model of each, and the metadata of a GGUF file that says what its config.json
// does.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "model/gguf_models.h"
#include "model/test_model.h"

namespace nibble {

using Edit = std::function<void(GgufWriter&)>;

// A model in its own format, and the metadata that says the same.
struct Family {
  const char* arch;
  const char* golden;  // directory of the golden checkpoint; null: random weights of `config`
  const char* config;
  const char* ffn_norm;
  Edit metadata;
};

inline void PrintTo(const Family& family, std::ostream* out) { *out << family.arch; }

inline void common_metadata(GgufWriter& w, const std::string& arch, uint32_t layers, float eps) {
  w.text("general.architecture", arch)
      .text("general.type", "model")
      .u32(arch + ".block_count", layers)
      .u32(arch + ".context_length", 4096)
      .u32(arch + ".embedding_length", 128)
      .u32(arch + ".vocab_size", 384)
      .u32(arch + ".attention.head_count_kv", 2)
      .f32(arch + ".attention.layer_norm_rms_epsilon", eps)
      .u32(arch + ".attention.key_length", 32)
      .u32(arch + ".attention.value_length", 32)
      .u32("tokenizer.ggml.eos_token_id", 2);
}

inline void experts(GgufWriter& w, const std::string& arch, uint32_t width) {
  w.u32(arch + ".expert_count", 16)
      .u32(arch + ".expert_used_count", 4)
      .u32(arch + ".expert_feed_forward_length", width);
}

inline constexpr const char* kDenseConfig = R"({"model_type": "MODEL", "hidden_size": 128, "vocab_size": 384,
  "num_hidden_layers": 3, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "rope_theta": 500000.0,
  "tie_word_embeddings": true, "eos_token_id": 2})";

inline std::vector<Family> families() {
  return {
      {"laguna", "laguna", nullptr, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "laguna", 5, 1e-6f);
         experts(w, "laguna", 64);
         std::string heads;
         for (uint32_t count : {4u, 6u, 6u, 4u, 6u}) heads += number_bytes(count);
         w.array("laguna.attention.head_count", GgufValueType::kU32, 5, heads)
             .u32("laguna.feed_forward_length", 256)
             .u32("laguna.attention.sliding_window", 24)
             .array("laguna.attention.sliding_window_pattern", GgufValueType::kBool, 5,
                    std::string("\0\1\1\0\1", 5))
             .f32("laguna.rope.freq_base", 500000)
             .u32("laguna.rope.dimension_count", 16)
             .f32("laguna.rope.freq_base_swa", 10000)
             .u32("laguna.rope.dimension_count_swa", 32)
             .text("laguna.rope.scaling.type", "yarn")
             .f32("laguna.rope.scaling.factor", 8)
             .u32("laguna.rope.scaling.original_context_length", 64)
             .f32("laguna.rope.scaling.yarn_beta_fast", 32)
             .f32("laguna.rope.scaling.yarn_beta_slow", 1)
             .f32("laguna.rope.scaling.yarn_ext_factor", 1)
             .f32("laguna.rope.scaling.yarn_attn_factor", 1.2079442f)
             .u32("laguna.expert_gating_func", 2)
             .boolean("laguna.expert_weights_norm", true)
             .f32("laguna.expert_weights_scale", 2.5f)
             .u32("laguna.expert_shared_count", 1)
             .u32("laguna.expert_shared_feed_forward_length", 64)
             .u32("laguna.leading_dense_block_count", 1);
       }},
      {"qwen3moe", "qwen3_moe-nvfp4", nullptr, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "qwen3moe", 4, 1e-6f);
         experts(w, "qwen3moe", 64);
         w.u32("qwen3moe.attention.head_count", 4)
             .u32("qwen3moe.feed_forward_length", 256)
             .f32("qwen3moe.rope.freq_base", 10000);
       }},
      {"glm4moe", "glm4_moe-nvfp4", nullptr, "post_attention_norm",
       [](GgufWriter& w) {
         common_metadata(w, "glm4moe", 5, 1e-5f);
         experts(w, "glm4moe", 64);
         w.u32("glm4moe.attention.head_count", 4)
             .u32("glm4moe.feed_forward_length", 256)
             .u32("glm4moe.nextn_predict_layers", 1)
             .u32("glm4moe.rope.dimension_count", 16)
             .f32("glm4moe.rope.freq_base", 10000)
             .u32("glm4moe.leading_dense_block_count", 1)
             .u32("glm4moe.expert_shared_count", 1)
             .u32("glm4moe.expert_gating_func", 2)
             .u32("glm4moe.expert_group_count", 4)
             .u32("glm4moe.expert_group_used_count", 2)
             .boolean("glm4moe.expert_weights_norm", true)
             .f32("glm4moe.expert_weights_scale", 1.5f)
             .tensor("blk.4.nextn.eh_proj.weight", {4, 4}, kGgufF32, std::string(64, '\0'))
             .tensor("blk.4.attn_norm.weight", {128}, kGgufF32, std::string(512, '\0'));
       }},
      {"gpt-oss", "gpt_oss-mxfp4", nullptr, "post_attention_norm",
       [](GgufWriter& w) {
         common_metadata(w, "gpt-oss", 4, 1e-5f);
         experts(w, "gpt-oss", 128);
         w.u32("gpt-oss.attention.head_count", 4)
             .u32("gpt-oss.feed_forward_length", 128)
             .u32("gpt-oss.attention.sliding_window", 24)
             .f32("gpt-oss.rope.freq_base", 150000)
             .text("gpt-oss.rope.scaling.type", "yarn")
             .f32("gpt-oss.rope.scaling.factor", 32)
             .u32("gpt-oss.rope.scaling.original_context_length", 4096);
       }},
      {"llama", "mixtral-nvfp4", nullptr, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "llama", 4, 1e-5f);
         w.u32("llama.expert_count", 8)
             .u32("llama.expert_used_count", 2)
             .u32("llama.attention.head_count", 4)
             .u32("llama.feed_forward_length", 128)
             .u32("llama.rope.dimension_count", 32)
             .f32("llama.rope.freq_base", 1000000);
       }},
      {"qwen3", nullptr, kDenseConfig, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "qwen3", 3, 1e-5f);
         w.u32("qwen3.attention.head_count", 4)
             .u32("qwen3.feed_forward_length", 256)
             .f32("qwen3.rope.freq_base", 500000);
       }},
      {"llama", nullptr, kDenseConfig, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "llama", 3, 1e-5f);
         w.u32("llama.attention.head_count", 4)
             .u32("llama.feed_forward_length", 256)
             .u32("llama.rope.dimension_count", 32)
             .f32("llama.rope.freq_base", 500000);
       }},
  };
}

// The rows of q and k are in another order there; tests permute them as float32.
inline bool is_llama(const Family& family) { return std::string(family.arch) == "llama"; }

inline std::string name_of(const testing::TestParamInfo<Family>& info) {
  std::string name = info.param.arch;
  if (is_llama(info.param) && info.param.golden != nullptr) name += "_mixtral";
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

inline std::string config_of(const Family& family) {
  if (family.config == nullptr)
    return read_text(FileSystem::posix(), golden_directory(family.golden) + "/config.json", 1 << 20).value();
  std::string config = family.config;
  return config.replace(config.find("MODEL"), 5, family.arch);
}

inline ModelSpec spec_of_text(const std::string& config) {
  auto spec = parse_spec(config, "config.json");
  EXPECT_TRUE(spec.ok()) << spec.status().message();
  return std::move(spec).value();
}

// Row 2i of each head is row i, row 2i + 1 is row i + K/2: what the architecture "llama" does to q and k.
inline RecordedTensors interleaved(RecordedTensors tensors, int64_t head_dim) {
  for (auto& [name, tensor] : tensors) {
    if (name.find("q_proj.weight") == std::string::npos && name.find("k_proj.weight") == std::string::npos)
      continue;
    const std::vector<float> halves = tensor.values;
    const int64_t k = tensor.shape[1];
    for (int64_t row = 0; row < tensor.shape[0]; ++row) {
      const int64_t head = row / head_dim, i = row % head_dim;
      const int64_t from = head * head_dim + i / 2 + (i % 2 == 0 ? 0 : head_dim / 2);
      std::copy_n(halves.begin() + from * k, k, tensor.values.begin() + row * k);
    }
  }
  return tensors;
}

// What a loader of the family's model takes: of its golden checkpoint, which must outlive it, or random.
inline RecordedTensors recorded(const Family& family, const ModelSpec& spec,
                                std::unique_ptr<WeightSource>& checkpoint) {
  if (family.golden != nullptr) {
    checkpoint = std::make_unique<Checkpoint>(
        Checkpoint::open(FileSystem::posix(), golden_directory(family.golden)).value());
  }
  Recorder recorder(checkpoint.get());
  auto ops = make_backend("reference", {.threads = 1}).value();
  const Status status = load_weights(spec, recorder, *ops).status();
  EXPECT_TRUE(status.ok()) << status.message();
  return std::move(recorder.tensors);
}

}  // namespace nibble
