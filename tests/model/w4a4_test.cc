// W4A4 as a choice for a whole model: what is refused, and what the three second-level scales do. That the
// numbers are right: golden_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>

#include "base/faulty_file.h"
#include "model/test_model.h"

namespace nibble {
namespace {

using Look = std::function<void(const ModelWeights&)>;

Status load(const FileSystem& files, const std::string& directory, const ExpertArithmetic& arithmetic,
            const Look& look = {}) {
  auto ops = make_backend("reference", {.threads = 1});
  NIBBLE_ASSIGN_OR_RETURN(ModelSpec spec, load_spec(files, directory));
  NIBBLE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(files, directory));
  NIBBLE_ASSIGN_OR_RETURN(const ModelWeights weights, load_weights(spec, checkpoint, **ops, arithmetic));
  if (look) look(weights);
  return {};
}

void expect_refused(const Status& status, const std::vector<std::string>& fragments) {
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.code(), ErrorCode::kUser);
  EXPECT_EQ(status.message().find('\n'), std::string::npos);
  for (const std::string& fragment : fragments)
    EXPECT_NE(status.message().find(fragment), std::string::npos) << status.message();
}

TEST(W4A4, OtherFormatsAreRefusedByName) {
  const ExpertArithmetic w4a4{.w4a4 = true};
  const FileSystem& files = FileSystem::posix();
  expect_refused(load(files, golden_directory("laguna"), w4a4),
                 {"laguna/model.safetensors", "'model.layers.1.mlp.experts.0.gate_proj' is BF16",
                  "W4A4 wants experts in NVFP4"});
  expect_refused(load(files, golden_directory("gpt_oss-mxfp4"), w4a4),
                 {"gpt_oss-mxfp4", "'model.layers.0.mlp.experts.0.gate_proj' is MXFP4"});
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class StaticScales : public testing::Test {
 protected:
  Status load_changed(const Look& look = {}) {
    FaultyFileSystem files;
    files.add_file("m/config.json", read(directory_ + "/config.json"));
    files.add_file("m/model.safetensors", weights_);
    return load(files, "m", {.w4a4 = true, .act_scale = ActScale::kStatic}, look);
  }
  void set(const std::string& tensor, float value) {
    Checkpoint checkpoint = Checkpoint::open(FileSystem::posix(), directory_).value();
    std::memcpy(weights_.data() + checkpoint.info(tensor)->begin, &value, sizeof(value));
  }
  std::string directory_ = golden_directory("laguna-nvfp4");
  std::string weights_ = read(directory_ + "/model.safetensors");
  const std::string one_ = "model.layers.2.mlp.experts.3.up_proj";
};

TEST_F(StaticScales, NoneAtAllAreAnError) {
  for (size_t at = 0; (at = weights_.find("input_scale", at)) != std::string::npos;)
    weights_.replace(at, 5, "other");
  expect_refused(load_changed(), {"no expert of 'model.layers.1.mlp.experts.' has an input scale"});
}

TEST_F(StaticScales, BrokenOnesAreAnErrorWhereTheyAreNeeded) {
  for (float bad : {-1.0f, std::nanf(""), INFINITY}) {
    set(one_ + ".input_scale", bad);
    expect_refused(load_changed(), {"m/model.safetensors", "'" + one_ + "'", "at least 0, found"});
  }
}

// Gate and up take the same quantized rows, by the larger scale; an expert that calibration never saw has
// none.
TEST_F(StaticScales, OfEachExpert) {
  const std::string experts = "model.layers.2.mlp.experts.";
  set(experts + "3.up_proj.input_scale", 0.5f);
  set(experts + "4.gate_proj.input_scale", 0.75f);
  set(experts + "5.down_proj.input_scale", 0.25f);
  for (const char* name : {"gate_proj", "up_proj", "down_proj"})
    set(experts + "6." + name + ".input_scale", 0);
  const Status status = load_changed([](const ModelWeights& weights) {
    const std::span<const ExpertWeights> layer = weights.layers[2].ffn.experts->experts();
    const float usual = layer[0].input_scale;
    EXPECT_GT(usual, 0.0f);
    EXPECT_LT(usual, 0.1f);
    const std::vector<std::pair<float, float>> wanted = {
        {0.5f, usual}, {0.75f, usual}, {usual, 0.25f}, {0, 0}};
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(layer[3 + i].input_scale, wanted[i].first) << i;
      EXPECT_EQ(layer[3 + i].down_input_scale, wanted[i].second) << i;
    }
  });
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(W4A4, TheThreeScales) {
  const std::vector<int32_t> ids = {5, 17, 300, 42, 7, 7, 200};
  auto logits = [&](const std::string& model, const ExpertArithmetic& arithmetic) {
    return load_test_model(golden_directory(model), "cpu", options_for(70, 1, 1024, arithmetic))
        .logits(ids, ids.size());
  };
  auto w4a4 = [](ActScale scale) { return ExpertArithmetic{.w4a4 = true, .act_scale = scale}; };
  const std::vector<float> exact = logits("laguna-nvfp4", {});
  std::vector<std::vector<float>> all = {exact};
  for (ActScale scale : {ActScale::kRow, ActScale::kStatic, ActScale::kUnit}) {
    all.push_back(logits("laguna-nvfp4", w4a4(scale)));
    double largest = 0, worst = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      largest = std::max(largest, std::fabs(double{exact[i]}));
      worst = std::max(worst, std::fabs(double{exact[i]} - all.back()[i]));
    }
    EXPECT_LT(worst, largest);
    for (size_t i = 0; i + 1 < all.size(); ++i) EXPECT_NE(all.back(), all[i]);
    // The other dialect of NVFP4 holds the same scales, as reciprocals, which may differ in their last bit.
    const std::vector<float> other = logits("laguna-ct", w4a4(scale));
    for (size_t i = 0; i < exact.size(); ++i) ASSERT_NEAR(other[i], all.back()[i], 1e-4 * largest);
  }
}

}  // namespace
}  // namespace nibble
