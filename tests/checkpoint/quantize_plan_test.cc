#include "checkpoint/quantize_plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/faulty_file.h"
#include "checkpoint/quantize_models.h"

namespace nibble {
namespace {

struct NameCase {
  const char* name;
  bool experts, all_linear;
};

constexpr NameCase kNames[] = {
    {"model.layers.1.mlp.experts.17.gate_proj.weight", true, true},
    {"model.layers.3.block_sparse_moe.experts.0.w2.weight", true, true},
    {"language_model.model.layers.1.mlp.experts.0.down_proj.weight", true, true},
    {"model.layers.1.mlp.shared_expert.gate_proj.weight", false, true},
    {"model.layers.1.mlp.shared_experts.down_proj.weight", false, true},
    {"model.layers.0.mlp.up_proj.weight", false, true},
    {"model.layers.0.self_attn.q_proj.weight", false, true},
    {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight", false, true},
    {"model.layers.0.self_attn.g_proj.weight", false, true},
    {"model.layers.0.linear_attn.in_proj_qkvz.weight", false, true},
    {"model.layers.0.feed_forward.w1.weight", false, true},
    // Routers, norms, ends, biases and what only looks like them.
    {"model.layers.1.mlp.gate.weight", false, false},
    {"model.layers.1.block_sparse_moe.gate.weight", false, false},
    {"model.layers.1.mlp.gate.up_proj.weight", false, false},
    {"model.layers.1.mlp.router.weight", false, false},
    {"model.layers.1.mlp.router.up_proj.weight", false, false},
    {"model.layers.1.mlp.shared_expert_gate.weight", false, false},
    {"model.layers.1.mlp.experts.e_score_correction_bias", false, false},
    {"model.layers.1.mlp.experts.weight", false, false},
    {"model.layers.1.mlp.experts.3.weight", false, false},
    {"model.layers.1.mlp.experts.3.down_proj.bias", false, false},
    {"model.layers.0.self_attn.q_norm.weight", false, false},
    {"model.layers.0.self_attn.q_proj.bias", false, false},
    {"model.layers.0.self_attn.indexer.k_proj.weight", false, false},
    {"model.embed_tokens.weight", false, false},
    {"lm_head.weight", false, false},
    {"model.visual.blocks.0.mlp.up_proj.weight", false, false},
    {"model.vision_tower.layers.0.mlp.experts.0.up_proj.weight", false, false},
    {"q_proj.weight", false, false},
    {"", false, false},
    {".weight", false, false},
};

TEST(QuantizePlan, Names) {
  for (const NameCase& row : kNames) {
    EXPECT_EQ(wants_quantization(row.name, QuantizeWhat::kExperts), row.experts) << row.name;
    EXPECT_EQ(wants_quantization(row.name, QuantizeWhat::kAllLinear), row.all_linear) << row.name;
  }
}

Result<QuantizePlan> plan_of(const SafetensorsWriter& weights, QuantizeType type,
                             const char* family = "laguna", QuantizeWhat what = QuantizeWhat::kExperts) {
  static std::vector<Checkpoint> checkpoints;  // a plan points into one
  Result<Checkpoint> checkpoint = Checkpoint::open(source_files(weights), kSource);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  checkpoints.push_back(std::move(checkpoint).value());
  return plan_quantization(checkpoints.back(), {{"model_type", family}}, type, what, 1 << 30);
}

std::string zeros(int64_t bytes) { return std::string(static_cast<size_t>(bytes), '\0'); }

TEST(QuantizePlan, ColumnsThatDoNotDivideStay) {
  SafetensorsWriter weights;
  weights.add("x.experts.0.a.weight", "BF16", {4, 32}, zeros(256))
      .add("x.experts.0.b.weight", "BF16", {4, 48}, zeros(384))
      .add("x.experts.0.c.weight", "BF16", {4, 40}, zeros(320))
      .add("x.experts.0.d.weight", "BF16", {0, 32}, "");
  auto plan = plan_of(weights, QuantizeType::kNvfp4);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->quantized, 2);
  EXPECT_EQ(plan->unquantized_modules, (std::vector<std::string>{"x.experts.0.c", "x.experts.0.d"}));
  plan = plan_of(weights, QuantizeType::kQ4);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->quantized, 1);
  EXPECT_EQ(plan->kept.size(), 3u);
}

TEST(QuantizePlan, Refusals) {
  const SafetensorsWriter stacked =
      SafetensorsWriter().add("x.experts.gate_up_proj", "BF16", {2, 32, 4}, zeros(512));
  const SafetensorsWriter odd =
      SafetensorsWriter().add("x.experts.gate_up_proj", "BF16", {2, 48, 4}, zeros(768));
  const SafetensorsWriter narrow = SafetensorsWriter().add("x.experts.0.a.weight", "BF16", {4, 8}, zeros(64));
  const SafetensorsWriter dense =
      SafetensorsWriter().add("x.mlp.up_proj.weight", "BF16", {4, 32}, zeros(256));
  const SafetensorsWriter scaled = source_weights().add("x.weight_scale_inv", "F32", {}, zeros(4));
  const SafetensorsWriter fp8 =
      SafetensorsWriter().add("x.experts.0.a.weight", "F8_E4M3", {4, 32}, zeros(128));
  struct Case {
    Result<QuantizePlan> plan;
    const char* fragment;
  };
  const Case cases[] = {
      {plan_of(stacked, QuantizeType::kNvfp4), "'x.experts.gate_up_proj' [2, 32, 4]"},
      {plan_of(stacked, QuantizeType::kNvfp4, "gpt_oss"), "--type mxfp4"},
      {plan_of(stacked, QuantizeType::kMxfp4, "gpt_oss", QuantizeWhat::kAllLinear), "--what experts"},
      {plan_of(odd, QuantizeType::kMxfp4, "gpt_oss"), "multiple of 32"},
      {plan_of(narrow, QuantizeType::kNvfp4), "multiples of 16"},
      {plan_of(dense, QuantizeType::kNvfp4), "--what all-linear"},
      {plan_of(scaled, QuantizeType::kNvfp4), "already quantized"},
      {plan_of(fp8, QuantizeType::kNvfp4), "F8_E4M3"},
  };
  for (const Case& row : cases) {
    ASSERT_FALSE(row.plan.ok()) << row.fragment;
    EXPECT_NE(row.plan.status().message().find(row.fragment), std::string::npos)
        << row.plan.status().message();
  }
}

}  // namespace
}  // namespace nibble
