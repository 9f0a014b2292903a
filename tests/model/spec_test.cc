// config.json to ModelSpec: what is read, and what is refused by key and value.
#include "model/spec.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "places.h"

namespace nibble {
namespace {

nlohmann::ordered_json demo_config() {
  std::ifstream file(demo_directory() + "/config.json");
  return nlohmann::ordered_json::parse(file);
}

Result<ModelSpec> parse(const nlohmann::ordered_json& config) {
  return parse_spec(config.dump(), "config.json");
}

TEST(Spec, DemoModel) {
  auto spec = parse(demo_config());
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->family, "laguna");
  EXPECT_EQ(spec->width, 384);
  ASSERT_EQ(spec->layers.size(), 8u);
  EXPECT_EQ(std::get<GqaSpec>(spec->layers[0].mixer).heads, 6);
  EXPECT_EQ(std::get<GqaSpec>(spec->layers[0].mixer).window, 0);
  EXPECT_EQ(spec->layers[0].dense_width, 1024);
  EXPECT_FALSE(spec->layers[0].moe.has_value());
  EXPECT_EQ(std::get<GqaSpec>(spec->layers[1].mixer).heads, 8);
  EXPECT_EQ(std::get<GqaSpec>(spec->layers[1].mixer).window, 128);
  ASSERT_TRUE(spec->layers[1].moe.has_value());
  EXPECT_EQ(spec->layers[1].moe->experts, 16);
  EXPECT_EQ(spec->layers[1].moe->router.scale, 2.5f);
  EXPECT_EQ(spec->ropes[0].rotary_dim, 32);
  EXPECT_EQ(spec->ropes[1].rotary_dim, 64);
  EXPECT_EQ(spec->eos, (std::vector<int32_t>{0, 4}));
  EXPECT_TRUE(spec->tied_head);
  EXPECT_TRUE(spec->ignored_config_keys.empty());
}

TEST(Spec, LagunaSwitches) {
  nlohmann::ordered_json config = demo_config();
  config["gating"] = "per-element";
  config["moe_router_score_func"] = "sqrtsoftplus";
  config["moe_router_logit_softcapping"] = 30.0;
  config["mlp_only_layers"] = {0};
  config["surprise"] = 1;
  config["new_attention_trick"] = false;
  config["rope_scaling"] = nullptr;
  config["text"]["mystery"] = 2;
  auto spec = parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(std::get<GqaSpec>(spec->layers[2].mixer).gate_width(), 8 * 64);
  EXPECT_EQ(spec->layers[2].moe->router.score, RouterScore::kSqrtSoftplus);
  EXPECT_EQ(spec->layers[2].moe->router.logit_softcap, 30.0f);
  EXPECT_EQ(spec->ignored_config_keys, (std::vector<std::string>{"surprise", "text"}));
}

struct Refused {
  const char* pointer;  // JSON pointer into the demo model's config
  nlohmann::ordered_json value;
  const char* fragment;  // of the message
};

TEST(Spec, WhatIsNotImplementedOrOutOfRangeIsRefusedByKeyAndValue) {
  const Refused table[] = {
      {"/model_type", "gpt2", "'gpt2' is not implemented; implemented: deepseek_v3, glm4_moe"},
      {"/model_type", 7, "'model_type' = 7: wanted a string"},
      {"/model_type", nullptr, "'model_type' is missing"},
      {"/hidden_act", "gelu", R"('hidden_act' = "gelu" is not implemented; implemented: "silu")"},
      {"/attention_bias", true, "'attention_bias' = true is not implemented"},
      {"/gating", "per-token", "'gating' = \"per-token\" is not implemented"},
      {"/gating", false, "'gating' = false is not implemented"},
      {"/gating_types", nlohmann::ordered_json::array({"per-head"}),
       "'gating_types': wanted a list of 8 strings"},
      {"/moe_router_score_func", "softmax", "'moe_router_score_func' = \"softmax\" is not implemented"},
      {"/norm_topk_prob", false, "'norm_topk_prob' = false is not implemented"},
      {"/moe_apply_router_weight_on_input", true,
       "'moe_apply_router_weight_on_input' = true is not implemented"},
      {"/swa_attention_sink_enabled", true, "'swa_attention_sink_enabled' = true is not implemented"},
      {"/decoder_sparse_step", 2, "'decoder_sparse_step' = 2 is not implemented"},
      {"/rope_parameters/full_attention/rope_type", "longrope",
       "'rope_parameters.full_attention.rope_type' = \"longrope\""},
      {"/rope_parameters/full_attention/rope_theta", -1, "rope_theta' = -1: wanted a value in"},
      {"/rope_parameters/full_attention/partial_rotary_factor", 1.5, "partial_rotary_factor' = 1.5"},
      {"/rope_parameters/sliding_attention", nullptr, "'rope_parameters.sliding_attention' is missing"},
      {"/rope_parameters", "yes", "'rope_parameters' = \"yes\": wanted an object"},
      {"/hidden_size", -384, "'hidden_size' = -384: wanted a value in [1,"},
      {"/hidden_size", 9223372036854775808u, "'hidden_size' = 9223372036854775808: wanted an integer"},
      {"/hidden_size", 384.5, "'hidden_size' = 384.5: wanted an integer"},
      {"/hidden_size", nullptr, "'hidden_size' is missing"},
      {"/vocab_size", 0, "'vocab_size' = 0"},
      {"/num_hidden_layers", 4294967296, "'num_hidden_layers' = 4294967296"},
      {"/num_hidden_layers", 9, "'num_attention_heads_per_layer': wanted a list of 9 integers"},
      {"/num_attention_heads_per_layer/3", 7, "layer 3: 7 query heads are no multiple of 2"},
      {"/num_attention_heads_per_layer/3", "8",
       "'num_attention_heads_per_layer', entry 3: wanted an integer"},
      {"/num_key_value_heads", 0, "'num_key_value_heads' = 0"},
      {"/layer_types/2", "linear_attention", "entry 2: 'linear_attention' is not implemented"},
      {"/layer_types", 3, "'layer_types': wanted a list of 8 strings, found 3"},
      {"/mlp_layer_types/2", "moe", "entry 2: 'moe' is not implemented"},
      {"/num_experts_per_tok", 17, "'num_experts_per_tok' = 17: wanted a value in [1, 16]"},
      {"/sliding_window", 0, "'sliding_window' = 0"},
      {"/rms_norm_eps", "small", "'rms_norm_eps' = \"small\": wanted a number"},
      {"/tie_word_embeddings", 1, "'tie_word_embeddings' = 1: wanted true or false"},
      {"/eos_token_id", 8192, "'eos_token_id' = 8192"},
      {"/eos_token_id/1", -4, "'eos_token_id', entry 1: wanted an integer"},
      {"/mlp_only_layers", nlohmann::ordered_json::array({0, 1}),
       "'mlp_only_layers' = [0,1]: wanted the dense layers"},
      {"/final_logit_softcapping", 30, "'final_logit_softcapping' is unknown"},
      {"/xlayer_types", 1, "'xlayer_types' is unknown to model_type 'laguna' and may change the result"},
      {"/rope_scaling", nlohmann::ordered_json::object({{"factor", 8}}), "'rope_scaling' is unknown"},
      {"/rope_parameters/full_attention/mscale", 1, "'rope_parameters.full_attention.mscale' is unknown"},
      {"/head_dim", 2048, "'head_dim' = 2048: wanted a value in [2, 1024]"},
      {"/bos_token_id", "zero", "'bos_token_id' = \"zero\": wanted an integer"},
  };
  for (const Refused& row : table) {
    nlohmann::ordered_json config = demo_config();
    config[nlohmann::ordered_json::json_pointer(row.pointer)] = row.value;
    auto spec = parse(config);
    ASSERT_FALSE(spec.ok()) << row.pointer;
    EXPECT_NE(spec.status().message().find(row.fragment), std::string::npos)
        << row.pointer << " gave: " << spec.status().message();
    EXPECT_EQ(spec.status().message().find('\n'), std::string::npos);
    EXPECT_EQ(spec.status().code(), ErrorCode::kUser);
  }
}

TEST(Spec, WhatIsNoConfigAtAll) {
  for (const char* text : {"", "{", "[]", "7", "{\"model_type\": \"laguna\"}",
                           "{\"model_type\": \"laguna\", \"a\": [[[", "\xff\xfe{}"}) {
    auto spec = parse_spec(text, "config.json");
    ASSERT_FALSE(spec.ok()) << text;
    EXPECT_EQ(spec.status().message().find("config.json: "), 0u) << spec.status().message();
    EXPECT_EQ(spec.status().message().find('\n'), std::string::npos) << spec.status().message();
  }
  auto deep = parse_spec(std::string(100000, '['), "config.json");
  ASSERT_FALSE(deep.ok());
  EXPECT_NE(deep.status().message().find("nested"), std::string::npos);
}

}  // namespace
}  // namespace nibble
