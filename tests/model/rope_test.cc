#include "model/rope.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

RopeSpec read(const std::string& json, int64_t head_dim, Status* status = nullptr) {
  Config config = Config::parse(json, "config.json").value();
  RopeSpec spec = read_rope(config, head_dim);
  if (status != nullptr) *status = config.status();
  return spec;
}

// Laguna-S-2.1, full attention layers; values from an independent implementation.
TEST(Rope, YarnOfLagunaS) {
  RopeSpec spec =
      read(R"({"rope_type": "yarn", "rope_theta": 500000.0, "partial_rotary_factor": 0.5, "factor": 128,
    "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1,
    "attention_factor": 1.4852030263919618})",
           128);
  RopeFrequencies f = rope_frequencies(spec);
  ASSERT_EQ(f.inv_freq.size(), 32u);
  EXPECT_FLOAT_EQ(f.attention_factor, 1.4852030263919618f);
  EXPECT_FLOAT_EQ(f.inv_freq[0], 1.0f);
  EXPECT_NEAR(f.inv_freq[8], 0.037606f, 5e-7);
  EXPECT_NEAR(f.inv_freq[12], 0.00488077f, 5e-9);
  EXPECT_NEAR(f.inv_freq[16], 0.000322863f, 5e-10);
  EXPECT_NEAR(f.inv_freq[31], 2.35458e-08f, 5e-14);
}

TEST(Rope, YarnWithoutFactorOnAttentionComputesIt) {
  RopeSpec spec = read(R"({"rope_type": "yarn", "rope_theta": 1e4, "factor": 8,
    "original_max_position_embeddings": 64})",
                       64);
  EXPECT_FLOAT_EQ(rope_frequencies(spec).attention_factor, 0.1f * std::log(8.0f) + 1.0f);
}

TEST(Rope, DefaultIsAPowerLaw) {
  RopeFrequencies f = rope_frequencies(read(R"({"rope_theta": 10000.0})", 8));
  ASSERT_EQ(f.inv_freq.size(), 4u);
  EXPECT_FLOAT_EQ(f.inv_freq[0], 1.0f);
  EXPECT_FLOAT_EQ(f.inv_freq[1], 0.1f);
  EXPECT_FLOAT_EQ(f.inv_freq[3], 0.001f);
  EXPECT_EQ(f.attention_factor, 1.0f);
}

TEST(Rope, OtherTypesAreRefusedByName) {
  Status status;
  read(R"({"rope_type": "longrope", "rope_theta": 1e4})", 64, &status);
  EXPECT_EQ(
      status.message(),
      R"(config.json: key 'rope_type' = "longrope" is not implemented; implemented: "default", "yarn", "llama3")");
  read(R"({"rope_theta": 1e4, "partial_rotary_factor": 0.01})", 64, &status);
  EXPECT_NE(status.message().find("partial_rotary_factor"), std::string::npos);
}

}  // namespace
}  // namespace nibble
