// Every switch of every family: what it does not implement, or cannot be, is refused at load by key and
// value.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "model/spec.h"
#include "places.h"

namespace nibble {
namespace {

using Json = nlohmann::ordered_json;

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::filesystem::path source() { return source_directory(); }

// A config of the family that loads; the corpus of the fuzzer starts from the same ones.
Json good_config(const std::string& family) {
  return Json::parse(read(source() / "tests/fuzz/corpus/config" / (family + ".json")));
}

std::vector<std::string> families() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(source() / "tests/fuzz/corpus/config"))
    names.push_back(entry.path().stem());
  std::ranges::sort(names);
  return names;
}

struct Refusal {
  std::string pointer;  // into the config
  Json value;
  std::string fragment;  // of the message
  std::string key = {};  // that the message names; empty: that of the pointer
};

// The pointer as messages name a key: with dots; an entry of a list by the list's key.
std::string key_of(const Refusal& refusal) {
  if (!refusal.key.empty()) return refusal.key;
  std::string key = std::regex_replace(refusal.pointer.substr(1), std::regex("/[0-9]+$"), "");
  std::ranges::replace(key, '/', '.');
  return key;
}

void expect_refused(const std::string& family, const Refusal& refusal) {
  Json config = good_config(family);
  config[Json::json_pointer(refusal.pointer)] = refusal.value;
  Result<ModelSpec> spec = parse_spec(config.dump(), "config.json");
  const std::string what = family + " " + refusal.pointer + " = " + refusal.value.dump();
  ASSERT_FALSE(spec.ok()) << what;
  const std::string& message = spec.status().message();
  EXPECT_EQ(spec.status().code(), ErrorCode::kUser) << what;
  EXPECT_EQ(message.find('\n'), std::string::npos) << what;
  EXPECT_NE(message.find("'" + key_of(refusal) + "'"), std::string::npos) << what << " gave: " << message;
  EXPECT_NE(message.find(refusal.fragment), std::string::npos) << what << " gave: " << message;
}

// What all families read in the same words.
std::vector<Refusal> common_refusals(const std::string& family) {
  const std::string at = family == "glm5_next" ? "/text_config/" : "/";
  std::vector<Refusal> all = {
      {at + "hidden_act", "gelu", R"(= "gelu" is not implemented; implemented: "silu")"},
      {at + "hidden_act", Json::array({"silu"}), R"(= ["silu"] is not implemented)"},
      {at + "tie_word_embeddings", "yes", R"(= "yes": wanted true or false)"},
      {at + "tie_word_embeddings", 1, "= 1: wanted true or false"},
      {at + "hidden_size", 0, "= 0: wanted a value in [1,"},
      {at + "hidden_size", "128", "wanted an integer"},
      {at + "vocab_size", -1, "= -1: wanted"},
      {at + "num_hidden_layers", 0, "= 0: wanted"},
      {at + "num_hidden_layers", 1 << 20, "wanted a value in"},
      {at + "max_position_embeddings", 0.5, "wanted an integer"},
      {at + "rms_norm_eps", nullptr, "is missing"},
      {at + "rms_norm_eps", -1, "= -1: wanted"},
      {at + "bos_token_id", 384, "= 384: wanted"},
      {at + "eos_token_id", 384, "= 384: wanted"},
      {at + "eos_token_id", Json::array({1, "end"}), "entry 1: wanted an integer"},
      {at + "num_attention_heads", 0, "= 0: wanted"},
      {"/quantization_config", "nvfp4", "wanted an object"},
      {"/quantization_config/quant_method", "gptq",
       R"(= "gptq" is not implemented; implemented: "modelopt")"},
      {"/quantization_config/quant_method", 4, "= 4 is not implemented"},
      {"/quantization_config/transform_config", Json{{"config_groups", {{"R1", 1}}}}, "is not implemented"},
  };
  // A key that nobody reads and that sounds like arithmetic.
  for (const char* key : {"attention_chunk_size", "final_logit_softcapping", "expert_dropout_scale"})
    all.push_back({at + key, 7, "is unknown to model_type '" + family + "' and may change the result"});
  return all;
}

// Of the families that rotate by read_model_rope: a whole object each time, of which one key is at fault.
std::vector<Refusal> rope_refusals() {
  const Json plain = {{"rope_type", "default"}, {"rope_theta", 10000}};
  const Json yarn = {
      {"rope_type", "yarn"}, {"rope_theta", 10000}, {"factor", 8}, {"original_max_position_embeddings", 64}};
  const Json llama3 = {{"rope_type", "llama3"}, {"rope_theta", 10000},
                       {"factor", 8},           {"low_freq_factor", 1},
                       {"high_freq_factor", 4}, {"original_max_position_embeddings", 64}};
  struct Row {
    const Json& object;
    const char* key;
    Json value;
    const char* fragment;
  };
  const std::vector<Row> rows = {
      {plain, "rope_type", "longrope", R"(= "longrope" is not implemented; implemented: "default", "yarn")"},
      {plain, "rope_type", "dynamic", R"(= "dynamic" is not implemented)"},
      {plain, "rope_theta", 1, "= 1: wanted a value in"},
      {plain, "rope_theta", nullptr, "is missing"},
      {plain, "partial_rotary_factor", 1.5, "= 1.5: wanted"},
      {plain, "partial_rotary_factor", 0.01, "wanted an even number of at least 2"},
      {yarn, "factor", nullptr, "is missing"},
      {yarn, "factor", 0.5, "= 0.5: wanted"},
      {yarn, "original_max_position_embeddings", nullptr, "is missing"},
      {yarn, "beta_fast", 0, "= 0: wanted"},
      {yarn, "beta_slow", "one", "wanted a number"},
      {yarn, "truncate", 1, "wanted true or false"},
      {yarn, "attention_factor", 0, "= 0: wanted"},
      {yarn, "mscale", -1, "= -1: wanted"},
      {yarn, "mscale_all_dim", "all", "wanted a number"},
      {llama3, "factor", 0, "= 0: wanted"},
      {llama3, "low_freq_factor", nullptr, "is missing"},
      {llama3, "low_freq_factor", 0, "= 0: wanted"},
      {llama3, "high_freq_factor", 1, "= 1: wanted more than low_freq_factor"},
      {llama3, "original_max_position_embeddings", 0, "= 0: wanted"},
  };
  std::vector<Refusal> all = {{"/rope_parameters", "default", "wanted an object"}};
  for (const Row& row : rows) {
    Json object = row.object;
    object[row.key] = row.value;
    all.push_back({"/rope_parameters", object, row.fragment});
    all.back().key = std::string("rope_parameters.") + row.key;
  }
  return all;
}

const std::vector<Refusal> kAttention = {
    {"/num_key_value_heads", 7, "query heads are no multiple of 7"},
    {"/num_key_value_heads", 0, "= 0: wanted"},
    {"/head_dim", 1, "= 1: wanted"},
    {"/head_dim", 1025, "= 1025: wanted"},
};

// The sigmoid router of DeepSeek-V3 and what goes with it.
std::vector<Refusal> deepseek_router(const std::string& at) {
  return {
      {at + "scoring_func", "softmax", R"(= "softmax" is not implemented; implemented: "sigmoid")"},
      {at + "topk_method", "group_limited_greedy", R"(= "group_limited_greedy" is not implemented)"},
      {at + "norm_topk_prob", "no", "wanted true or false"},
      {at + "routed_scaling_factor", -1, "= -1: wanted"},
      {at + "n_group", 3, "= 3: wanted groups of equal size and at least 2 of 16 experts"},
      {at + "n_group", 16, "= 16: wanted groups of equal size and at least 2 of 16 experts"},
      {at + "topk_group", 17, "= 17: wanted"},
      {at + "n_routed_experts", 0, "= 0: wanted"},
      {at + "num_experts_per_tok", 17, "= 17: wanted"},
      {at + "moe_intermediate_size", 0, "= 0: wanted"},
      {at + "n_shared_experts", -1, "= -1: wanted"},
      {at + "intermediate_size", 0, "= 0: wanted"},
  };
}

std::vector<Refusal> operator+(std::vector<Refusal> a, const std::vector<Refusal>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<Refusal> own_refusals(const std::string& family) {
  const std::string text = "/text_config/";
  if (family == "deepseek_v3")
    return rope_refusals() + deepseek_router("/") +
           std::vector<Refusal>{
               {"/attention_bias", true, "= true is not implemented; implemented: false"},
               {"/moe_layer_freq", 2, "= 2 is not implemented; implemented: 1"},
               {"/rope_interleave", "yes", "wanted true or false"},
               {"/first_k_dense_replace", -1, "= -1: wanted"},
               {"/num_nextn_predict_layers", 17, "= 17: wanted"},
               {"/num_experts_per_tok", 9, "only 8 experts are in the 2 groups of 'topk_group'"},
               {"/q_lora_rank", 0, "= 0: wanted"},
               {"/kv_lora_rank", 1020, "more than 1024 together"},
               {"/qk_nope_head_dim", 0, "= 0: wanted"},
               {"/qk_rope_head_dim", 0, "= 0: wanted"},
               {"/v_head_dim", 0, "= 0: wanted"},
           };
  if (family == "glm4_moe")
    return rope_refusals() + kAttention + deepseek_router("/") +
           std::vector<Refusal>{
               {"/rope_parameters/short_factor", Json::array({1, 2}), "is unknown"},
               {"/use_qk_norm", "per_head", "wanted true or false"},
               {"/attention_bias", "q", "wanted true or false"},
               {"/first_k_dense_replace", -1, "= -1: wanted"},
               {"/num_nextn_predict_layers", -1, "= -1: wanted"},
               {"/num_experts_per_tok", 9, "only 8 experts are in the 2 groups of 'topk_group'"},
               {"/partial_rotary_factor", -0.5, "= -0.5: wanted"},
           };
  if (family == "glm5_next")
    return deepseek_router(text) +
           std::vector<Refusal>{
               {text + "attention_bias", true, "= true is not implemented; implemented: false"},
               {text + "qk_rope_head_dim", 16, "= 16 is not implemented; implemented: 0"},
               {text + "index_kpool_always_select_tail", false,
                "= false is not implemented; implemented: true"},
               {text + "index_topk", 33, "wanted a multiple of index_kpool 4"},
               {text + "index_topk", 2, "= 2: wanted"},
               {text + "index_kpool", 0, "= 0: wanted"},
               {text + "index_n_heads", 0, "= 0: wanted"},
               {text + "index_head_dim", 0, "= 0: wanted"},
               {text + "layer_types", "linear_attention", "wanted a list of 8 strings"},
               {text + "mlp_layer_types", Json::array({"dense"}), "wanted a list of 8 strings"},
               {text + "indexer_types", 3, "wanted a list of 8 strings"},
               {text + "layer_types/0", "full_attention", "entry 0: 'full_attention' is not implemented",
                "layer_types"},
               {text + "mlp_layer_types/0", "moe", "entry 0: 'moe' is not implemented", "mlp_layer_types"},
               {text + "indexer_types/3", "shared", "entry 3: 'shared' is not implemented", "indexer_types"},
               {text + "indexer_types/7", "sparse", "implemented: full, and shared behind a full one",
                "indexer_types"},
               {text + "linear_num_heads", 0, "= 0: wanted"},
               {text + "linear_head_dim", 0, "= 0: wanted"},
               {text + "linear_conv_kernel_dim", 1, "= 1: wanted"},
               {text + "linear_lower_bound", 1, "= 1: wanted"},
               {text + "linear_attn_config", 4, "wanted an object"},
               {text + "swiglu_limit", 0, "= 0: wanted"},
               {text + "hc_mult", 0, "= 0: wanted"},
               {text + "hc_sinkhorn_iters", 0, "= 0: wanted"},
               {text + "hc_eps", -1, "= -1: wanted"},
               {text + "q_lora_rank", nullptr, "is missing"},
               {text + "kv_lora_rank", 1025, "more than 1024 together"},
               {text + "qk_nope_head_dim", 0, "= 0: wanted"},
               {text + "v_head_dim", 0, "= 0: wanted"},
               {"/text_config", "flat", "wanted an object"},
               {"/tie_word_embeddings", true, "= true is not implemented; implemented: false"},
           };
  if (family == "gpt_oss")
    return rope_refusals() + kAttention +
           std::vector<Refusal>{
               {"/attention_bias", 1, "wanted true or false"},
               {"/layer_types/2", "chunked_attention",
                "entry 2: 'chunked_attention' is not implemented; implemented: full_attention, "
                "sliding_attention"},
               {"/layer_types", Json::array({"full_attention"}), "wanted a list of 4 strings"},
               {"/sliding_window", 0, "= 0: wanted"},
               {"/rope_parameters/short_factor", Json::array({1, 2}), "is unknown"},
               {"/swiglu_limit", 0, "= 0: wanted"},
               {"/num_local_experts", 0, "= 0: wanted"},
               {"/num_experts_per_tok", 17, "= 17: wanted"},
               {"/intermediate_size", 0, "= 0: wanted"},
               {"/norm_topk_prob", true, "is unknown"},
           };
  if (family == "laguna")
    return kAttention +
           std::vector<Refusal>{
               {"/attention_bias", true, "= true is not implemented; implemented: false"},
               {"/swa_attention_sink_enabled", true, "= true is not implemented; implemented: false"},
               {"/decoder_sparse_step", 2, "= 2 is not implemented; implemented: 1"},
               {"/gating", "per-token", R"(= "per-token" is not implemented)"},
               {"/gating_types", Json::array({"per-head"}), "wanted a list of 5 strings"},
               {"/gating_types", Json::array({"per-head", "per-element", "per-head", "per-head", "per-head"}),
                "layers with other gates"},
               {"/moe_router_score_func", "softmax", R"(= "softmax" is not implemented)"},
               {"/norm_topk_prob", false, "= false is not implemented; implemented: true"},
               {"/moe_apply_router_weight_on_input", true, "= true is not implemented; implemented: false"},
               {"/moe_router_logit_softcapping", -1, "= -1: wanted"},
               {"/moe_routed_scaling_factor", "2.5", "wanted a number"},
               {"/num_attention_heads_per_layer", 4, "wanted a list of 5 integers"},
               {"/layer_types/2", "chunked_attention", "entry 2: 'chunked_attention' is not implemented"},
               {"/mlp_layer_types/2", "moe", "entry 2: 'moe' is not implemented"},
               {"/mlp_only_layers", Json::array({0, 1}), "wanted the dense layers of mlp_layer_types"},
               {"/sliding_window", 0, "= 0: wanted"},
               {"/num_experts", 0, "= 0: wanted"},
               {"/num_experts_per_tok", 1000, "= 1000: wanted"},
               {"/moe_intermediate_size", 0, "= 0: wanted"},
               {"/shared_expert_intermediate_size", -1, "= -1: wanted"},
               {"/intermediate_size", 0, "= 0: wanted"},
               {"/rope_parameters/full_attention/rope_type", "longrope", "is not implemented"},
               {"/rope_parameters/sliding_attention", nullptr, "is missing"},
           };
  if (family == "llama")
    return rope_refusals() + kAttention +
           std::vector<Refusal>{
               {"/rope_interleaved", "yes", R"(= "yes")"},
               {"/rope_scaling/short_factor", Json::array({1, 2}), "is unknown"},
               {"/mlp_bias", true, "= true is not implemented; implemented: false"},
               {"/attention_bias", "all", "wanted true or false"},
               {"/intermediate_size", 0, "= 0: wanted"},
               {"/rope_theta", 0, "= 0: wanted"},
               {"/rope_scaling", "llama3", "wanted an object"},
               {"/rope_scaling/rope_type", "linear", R"(= "linear" is not implemented)"},
               {"/rope_scaling/high_freq_factor", 0.5, "wanted more than low_freq_factor"},
           };
  if (family == "minimax_m2")
    return rope_refusals() + kAttention +
           std::vector<Refusal>{
               {"/use_qk_norm", false, "= false is not implemented; implemented: true"},
               {"/qk_norm_type", "per_head", R"(= "per_head" is not implemented; implemented: "per_layer")"},
               {"/use_routing_bias", false, "= false is not implemented; implemented: true"},
               {"/use_mtp", "yes", R"(= "yes" is not implemented)"},
               {"/shared_intermediate_size", 64, "= 64 is not implemented; implemented: 0"},
               {"/norm_topk_prob", false, "= false is not implemented; implemented: true"},
               {"/scoring_func", "softmax", R"(= "softmax" is not implemented)"},
               {"/topk_method", "greedy", R"(= "greedy" is not implemented)"},
               {"/attn_type_list", Json::array({1, 0, 1, 1}),
                "entry 1: wanted an integer in [1, 1], found 0"},
               {"/rotary_dim", 3, "= 3: wanted an even number"},
               {"/rotary_dim", 64, "= 64: wanted"},
               {"/num_local_experts", 0, "= 0: wanted"},
               {"/num_experts_per_tok", 17, "= 17: wanted"},
               {"/intermediate_size", 0, "= 0: wanted"},
               {"/attention_bias", true, "is unknown"},
           };
  if (family == "mixtral")
    return rope_refusals() + kAttention +
           std::vector<Refusal>{
               {"/sliding_window", 0, "= 0: wanted"},
               {"/num_local_experts", 0, "= 0: wanted"},
               {"/num_experts_per_tok", 9, "= 9: wanted"},
               {"/intermediate_size", 0, "= 0: wanted"},
               {"/attention_bias", true, "is unknown"},
               {"/layer_types", Json::array({"full_attention"}), "is unknown"},
           };
  if (family == "olmoe")
    return rope_refusals() + std::vector<Refusal>{
                                 {"/num_key_value_heads", 3, "4 query heads are no multiple of 3"},
                                 {"/rope_parameters/short_factor", Json::array({1, 2}), "is unknown"},
                                 {"/clip_qkv", 8.0, "= 8.0 is not implemented; implemented: null"},
                                 {"/attention_bias", 0, "wanted true or false"},
                                 {"/norm_topk_prob", 1, "wanted true or false"},
                                 {"/num_experts", 0, "= 0: wanted"},
                                 {"/num_experts_per_tok", 17, "= 17: wanted"},
                                 {"/intermediate_size", 0, "= 0: wanted"},
                             };
  const std::vector<Refusal> qwen3 =
      rope_refusals() + kAttention +
      std::vector<Refusal>{
          {"/use_sliding_window", true, "= true is not implemented; implemented: false"},
          {"/attention_bias", "qkv", "wanted true or false"},
          {"/intermediate_size", 0, "= 0: wanted"},
      };
  if (family == "qwen3")
    return qwen3 + std::vector<Refusal>{
                       {"/layer_types/1", "sliding_attention",
                        "'sliding_attention' is not implemented; implemented: full_attention"},
                       {"/rope_scaling", 2, "wanted an object"},
                   };
  if (family == "qwen3_moe")
    return qwen3 + std::vector<Refusal>{
                       {"/decoder_sparse_step", 0, "= 0: wanted"},
                       {"/mlp_only_layers", Json::array({4}), "entry 0: wanted an integer in [0, 3]"},
                       {"/norm_topk_prob", "yes", "wanted true or false"},
                       {"/num_experts", 0, "= 0: wanted"},
                       {"/num_experts_per_tok", 17, "= 17: wanted"},
                       {"/moe_intermediate_size", 0, "= 0: wanted"},
                   };
  ADD_FAILURE() << "no refusals of " << family;
  return {};
}

class Refusals : public testing::TestWithParam<std::string> {};

TEST_P(Refusals, TheGoodConfigLoads) {
  Result<ModelSpec> spec = parse_spec(good_config(GetParam()).dump(), "config.json");
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->family, GetParam());
  EXPECT_TRUE(spec->ignored_config_keys.empty());
}

TEST_P(Refusals, WhatAllReadInTheSameWords) {
  for (const Refusal& refusal : common_refusals(GetParam())) expect_refused(GetParam(), refusal);
}

TEST_P(Refusals, ItsOwnSwitches) {
  for (const Refusal& refusal : own_refusals(GetParam())) expect_refused(GetParam(), refusal);
}

// Methods that are read are no reason to refuse, whatever else is written beside them.
TEST_P(Refusals, QuantizationThatIsRead) {
  for (const char* method : {"modelopt", "compressed-tensors", "mxfp4", "fp8", "nibble-q4"}) {
    Json config = good_config(GetParam());
    config["quantization_config"] = {{"quant_method", method},
                                     {"activation_scheme", "dynamic"},
                                     {"transform_config", Json::object()},
                                     {"ignored_layers", Json::array({"x"})}};
    Result<ModelSpec> spec = parse_spec(config.dump(), "config.json");
    EXPECT_TRUE(spec.ok()) << spec.status().message();
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Refusals, testing::ValuesIn(families()),
                         [](const auto& info) { return info.param; });

// A family that is added needs a config here, and a switch that is added needs a row.
// Width of a head that nobody wrote, but that follows from the others.
TEST(Refusal, HeadsThatComeOutTooWide) {
  for (int heads : {4, 4096}) {
    Json config = good_config("llama");
    config.erase("head_dim");
    config["hidden_size"] = 5218;
    config["num_attention_heads"] = config["num_key_value_heads"] = heads;
    const Result<ModelSpec> spec = parse_spec(config.dump(), "config.json");
    ASSERT_FALSE(spec.ok()) << heads;
    EXPECT_NE(spec.status().message().find("a head has 2 to 1024 elements"), std::string::npos)
        << spec.status().message();
  }
}

TEST(RefusalTable, IsComplete) {
  Json config = good_config("llama");
  config["model_type"] = "none";
  std::string known;
  for (const std::string& family : families()) known += (known.empty() ? "" : ", ") + family;
  EXPECT_NE(parse_spec(config.dump(), "config.json").status().message().find("implemented: " + known),
            std::string::npos);

  std::map<std::string, std::set<std::string>> refused;  // family -> keys
  for (const std::string& family : families()) {
    for (const Refusal& refusal : common_refusals(family) + own_refusals(family))
      refused[family].insert(refusal.pointer.substr(refusal.pointer.rfind('/') + 1));
  }
  const std::regex only(R"re(\.only\(\s*"([a-z_]+)")re");
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(source() / "src/model/families")) {
    if (entry.path().extension() != ".cc") continue;
    const std::string text = read(entry.path()), family = entry.path().stem();
    for (std::sregex_iterator at(text.begin(), text.end(), only), end; at != end; ++at, ++found) {
      const std::string key = (*at)[1];
      const bool shared = family == "common";
      EXPECT_TRUE(std::ranges::any_of(refused,
                                      [&](const auto& of) {
                                        return (shared || of.first.starts_with(family)) &&
                                               of.second.count(key) != 0;
                                      }))
          << entry.path() << " implements only some values of '" << key << "', and no row above has it";
    }
  }
  EXPECT_GT(found, 20);
}

}  // namespace
}  // namespace nibble
