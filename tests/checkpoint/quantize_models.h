// Models that the quantize tests take as source, and what came out.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/faulty_file.h"
#include "checkpoint/quantize.h"
#include "checkpoint/write_safetensors.h"
#include "quant/float_codes.h"

namespace nibble {

inline constexpr const char* kSource = "m";
inline constexpr const char* kWeights = "m/model.safetensors";

inline std::vector<float> random_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = bf16_to_float(float_to_bf16(normal(random)));
  return values;
}

inline std::string bf16(const std::vector<float>& values) {
  std::vector<uint16_t> codes;
  for (float value : values) codes.push_back(float_to_bf16(value));
  return bytes_of(codes);
}

inline std::string expert(int i, const char* matrix) {
  return "model.layers.0.mlp.experts." + std::to_string(i) + "." + matrix + ".weight";
}

// Six experts and some of everything that is to stay.
inline SafetensorsWriter source_weights() {
  SafetensorsWriter writer;
  writer.add("model.embed_tokens.weight", "BF16", {40, 64}, bf16(random_values(40 * 64, 1)))
      .add("model.layers.0.input_layernorm.weight", "F32", {64}, bytes_of(random_values(64, 2)))
      .add("model.layers.0.mlp.gate.weight", "BF16", {6, 64}, bf16(random_values(6 * 64, 3)))
      .add("model.layers.0.mlp.shared_expert.up_proj.weight", "BF16", {32, 64},
           bf16(random_values(32 * 64, 4)))
      .add("model.layers.0.self_attn.q_proj.weight", "BF16", {48, 64}, bf16(random_values(48 * 64, 5)));
  for (int i = 0; i < 6; ++i) {
    const auto seed = static_cast<uint32_t>(10 * i + 100);
    writer.add(expert(i, "gate_proj"), "BF16", {32, 64}, bf16(random_values(32 * 64, seed)))
        .add(expert(i, "up_proj"), "F32", {32, 64}, bytes_of(random_values(32 * 64, seed + 1)))
        .add(expert(i, "down_proj"), "BF16", {64, 32}, bf16(random_values(64 * 32, seed + 2)));
  }
  return writer;
}

inline FaultyFileSystem source_files(const SafetensorsWriter& weights = source_weights(),
                                     const std::string& config = R"({"model_type": "laguna"})") {
  FaultyFileSystem files;
  files.add_file(kWeights, weights.file());
  files.add_file("m/config.json", config);
  files.add_file("m/tokenizer.json", "{\"a tokenizer\": 1}");
  files.add_file("m/templates/tool.jinja", "{{ messages }}");
  files.add_file("m/.gitattributes", "hidden");
  files.add_file("m/old.bin", "weights of another kind");
  return files;
}

// A new empty directory of a test's own, and DST inside of it.
class QuantizeTest : public testing::Test {
 protected:
  QuantizeTest() {
    const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(testing::TempDir()) / ("nibble_quantize_" + std::string(test.name()));
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~QuantizeTest() override { std::filesystem::remove_all(root_); }

  std::string path(const std::string& name) const { return (root_ / name).string(); }
  QuantizeOptions options(const std::string& name = "dst", int64_t max_shard_bytes = 10'000) const {
    return {.source = kSource, .destination = path(name), .max_shard_bytes = max_shard_bytes, .version = "1"};
  }

 private:
  std::filesystem::path root_;
};

// Every file below `directory` with its bytes.
inline std::map<std::string, std::string> tree_of(const std::string& directory) {
  std::map<std::string, std::string> tree;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.is_directory()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    tree[std::filesystem::relative(entry.path(), directory).string()] = {std::istreambuf_iterator<char>(file),
                                                                         std::istreambuf_iterator<char>()};
  }
  return tree;
}

// For messages: a difference of trees is not worth printing in full.
inline void expect_same_tree(const std::map<std::string, std::string>& found,
                             const std::map<std::string, std::string>& wanted) {
  std::vector<std::string> found_names, wanted_names;
  for (const auto& [name, bytes] : found) found_names.push_back(name);
  for (const auto& [name, bytes] : wanted) wanted_names.push_back(name);
  ASSERT_EQ(found_names, wanted_names);
  for (const auto& [name, bytes] : wanted) EXPECT_TRUE(found.at(name) == bytes) << name;
}

}  // namespace nibble
