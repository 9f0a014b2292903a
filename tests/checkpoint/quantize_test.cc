#include "checkpoint/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize_models.h"
#include "quant/matrix.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"
#include "quant/q4.h"

namespace nibble {
namespace {

using Shape = std::vector<int64_t>;

nlohmann::ordered_json json_of(const std::map<std::string, std::string>& tree, const std::string& name) {
  return parse_json(tree.at(name), name).value();
}

const uint8_t* data(const TensorView& view) { return reinterpret_cast<const uint8_t*>(view.bytes.data()); }

TEST_F(QuantizeTest, Nvfp4IsWhatTheCodecMakes) {
  const auto done = quantize_model(source_files(), options());
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_EQ(done->tensors, 18);
  auto checkpoint = Checkpoint::open(FileSystem::posix(), path("dst"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_GT(done->shards, 3);
  for (int i = 0; i < 6; ++i) {
    const std::vector<float> values = random_values(32 * 64, static_cast<uint32_t>(10 * i + 101));
    float amax = 0;
    for (float value : values) amax = std::max(amax, std::fabs(value));
    const std::string name = expert(i, "up_proj");
    const auto matrix = checkpoint->matrix(name.substr(0, name.size() - 7), 32, 64);
    ASSERT_TRUE(matrix.ok()) << matrix.status().message();
    EXPECT_EQ(matrix->tensor_scale, nvfp4::choose_tensor_scale(amax));
    std::vector<uint8_t> codes(32), scales(4);
    for (int64_t row = 0; row < 32; ++row) {
      nvfp4::quantize_row(values.data() + row * 64, 64, matrix->tensor_scale, codes.data(), scales.data());
      EXPECT_TRUE(
          std::equal(codes.begin(), codes.end(), static_cast<const uint8_t*>(matrix->codes) + row * 32));
      EXPECT_TRUE(
          std::equal(scales.begin(), scales.end(), static_cast<const uint8_t*>(matrix->scales) + row * 4));
    }
  }
  // What is not an expert is the same tensor as before.
  const auto kept =
      checkpoint->tensor("model.layers.0.self_attn.q_proj.weight", Shape{48, 64}, {DType::kBF16});
  ASSERT_TRUE(kept.ok()) << kept.status().message();
  const std::string wanted = bf16(random_values(48 * 64, 5));
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), reinterpret_cast<const char*>(data(*kept))));
}

TEST_F(QuantizeTest, FilesBesideTheWeights) {
  ASSERT_TRUE(quantize_model(source_files(), options("nvfp4")).ok());
  auto tree = tree_of(path("nvfp4"));
  EXPECT_EQ(tree.count("old.bin") + tree.count(".gitattributes"), 0u);
  EXPECT_EQ(tree.at("tokenizer.json"), "{\"a tokenizer\": 1}");
  EXPECT_EQ(tree.at("templates/tool.jinja"), "{{ messages }}");
  const auto config = json_of(tree, "config.json")["quantization_config"];
  EXPECT_EQ(json_of(tree, "config.json")["model_type"], "laguna");
  EXPECT_EQ(config["quant_method"], "modelopt");
  EXPECT_EQ(config["quant_algo"], "W4A16_NVFP4");
  EXPECT_EQ(config["group_size"], 16);
  EXPECT_TRUE(config["kv_cache_quant_algo"].is_null());
  const std::vector<std::string> unquantized = {"model.embed_tokens", "model.layers.0.mlp.gate",
                                                "model.layers.0.mlp.shared_expert.up_proj",
                                                "model.layers.0.self_attn.q_proj"};
  EXPECT_EQ(config["exclude_modules"], unquantized);
  const auto hf = json_of(tree, "hf_quant_config.json")["quantization"];
  for (const auto& [key, value] : hf.items()) EXPECT_EQ(config[key], value) << key;

  QuantizeOptions mxfp4 = options("mxfp4");
  mxfp4.type = QuantizeType::kMxfp4;
  ASSERT_TRUE(quantize_model(source_files(), mxfp4).ok());
  tree = tree_of(path("mxfp4"));
  EXPECT_EQ(tree.count("hf_quant_config.json"), 0u);
  const auto ct = json_of(tree, "config.json")["quantization_config"];
  EXPECT_EQ(ct["quant_method"], "compressed-tensors");
  EXPECT_EQ(ct["format"], "mxfp4-pack-quantized");
  EXPECT_EQ(ct["config_groups"]["group_0"]["weights"]["group_size"], 32);
  EXPECT_EQ(ct["config_groups"]["group_0"]["targets"], std::vector<std::string>{"Linear"});
  EXPECT_EQ(ct["ignore"], unquantized);
}

TEST_F(QuantizeTest, Mxfp4AndQ4Layouts) {
  const std::vector<float> values = random_values(64 * 32, 122);
  std::vector<uint8_t> codes(64 * 16), scales(64);
  std::vector<uint16_t> q4_scales(64);
  for (QuantizeType type : {QuantizeType::kMxfp4, QuantizeType::kQ4}) {
    QuantizeOptions job = options(std::string(quantize_type_name(type)));
    job.type = type;
    ASSERT_TRUE(quantize_model(source_files(), job).ok());
    auto checkpoint = Checkpoint::open(FileSystem::posix(), job.destination);
    ASSERT_TRUE(checkpoint.ok());
    const std::string weight = expert(2, "down_proj");
    EXPECT_FALSE(checkpoint->has(weight));
    const bool is_q4 = type == QuantizeType::kQ4;
    const auto code_view = is_q4 ? checkpoint->tensor(weight + "_q4", Shape{64, 1, 4}, {DType::kU32})
                                 : checkpoint->tensor(weight + "_packed", Shape{64, 16}, {DType::kU8});
    const auto scale_view =
        checkpoint->tensor(weight + "_scale", Shape{64, 1}, {is_q4 ? DType::kF16 : DType::kU8});
    ASSERT_TRUE(code_view.ok()) << code_view.status().message();
    ASSERT_TRUE(scale_view.ok()) << scale_view.status().message();
    for (int64_t row = 0; row < 64; ++row) {
      if (is_q4) {
        q4::quantize_row(values.data() + row * 32, 32, codes.data() + row * 16, q4_scales.data() + row);
      } else {
        mxfp4::quantize_row(values.data() + row * 32, 32, codes.data() + row * 16, scales.data() + row);
      }
    }
    EXPECT_TRUE(std::equal(codes.begin(), codes.end(), data(*code_view)));
    if (is_q4) {
      EXPECT_TRUE(std::equal(q4_scales.begin(), q4_scales.end(),
                             reinterpret_cast<const uint16_t*>(data(*scale_view))));
    } else {
      EXPECT_TRUE(std::equal(scales.begin(), scales.end(), data(*scale_view)));
    }
  }
}

// [E, K, N] with more columns than a tile, against a transposition element by element.
TEST_F(QuantizeTest, GptOssIsTransposed) {
  constexpr int64_t kExperts = 3, kK = 64, kN = 130;
  const std::vector<float> values = random_values(kExperts * kK * kN, 9);
  const std::string base = "model.layers.0.mlp.experts.gate_up_proj";
  SafetensorsWriter writer;
  writer.add(base, "BF16", {kExperts, kK, kN}, bf16(values))
      .add(base + "_bias", "BF16", {kExperts, kN}, bf16(random_values(kExperts * kN, 10)));
  QuantizeOptions job = options();
  job.type = QuantizeType::kMxfp4;
  job.threads = 3;
  const auto done = quantize_model(source_files(writer, R"({"model_type": "gpt_oss"})"), job);
  ASSERT_TRUE(done.ok()) << done.status().message();
  auto checkpoint = Checkpoint::open(FileSystem::posix(), path("dst"));
  ASSERT_TRUE(checkpoint.ok());
  const auto blocks = checkpoint->tensor(base + "_blocks", Shape{kExperts, kN, kK / 32, 16}, {DType::kU8});
  const auto scales = checkpoint->tensor(base + "_scales", Shape{kExperts, kN, kK / 32}, {DType::kU8});
  ASSERT_TRUE(blocks.ok() && scales.ok());
  EXPECT_TRUE(checkpoint->has(base + "_bias"));
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t n = 0; n < kN; ++n) {
      std::vector<float> row;
      for (int64_t k = 0; k < kK; ++k) row.push_back(values[static_cast<size_t>((e * kK + k) * kN + n)]);
      std::vector<uint8_t> codes(kK / 2), scale(kK / 32);
      mxfp4::quantize_row(row.data(), kK, codes.data(), scale.data());
      ASSERT_TRUE(std::equal(codes.begin(), codes.end(), data(*blocks) + (e * kN + n) * kK / 2))
          << e << " " << n;
      ASSERT_TRUE(std::equal(scale.begin(), scale.end(), data(*scales) + (e * kN + n) * kK / 32))
          << e << " " << n;
    }
  }
  const auto config = json_of(tree_of(path("dst")), "config.json")["quantization_config"];
  EXPECT_EQ(config["quant_method"], "mxfp4");
}

TEST_F(QuantizeTest, AnyNumberOfThreadsGivesTheSameBytes) {
  for (QuantizeType type : {QuantizeType::kNvfp4, QuantizeType::kMxfp4, QuantizeType::kQ4}) {
    std::map<std::string, std::string> wanted;
    for (int threads : {1, 2, 3, 7}) {
      QuantizeOptions job = options(fmt::format("{}{}", quantize_type_name(type), threads));
      job.type = type;
      job.what = QuantizeWhat::kAllLinear;
      job.threads = threads;
      ASSERT_TRUE(quantize_model(source_files(), job).ok());
      const auto tree = tree_of(job.destination);
      if (threads == 1) wanted = tree;
      expect_same_tree(tree, wanted);
    }
  }
}

TEST_F(QuantizeTest, ShardsKeepToTheirSize) {
  for (int64_t size : {int64_t{1}, int64_t{6000}, int64_t{20'000}, int64_t{1} << 40}) {
    const auto done = quantize_model(source_files(), options(std::to_string(size), size));
    ASSERT_TRUE(done.ok()) << done.status().message();
    const auto tree = tree_of(path(std::to_string(size)));
    if (size == int64_t{1} << 40) {
      EXPECT_EQ(tree.count("model.safetensors"), 1u);
      EXPECT_EQ(tree.count("model.safetensors.index.json"), 0u);
      continue;
    }
    const auto index = json_of(tree, "model.safetensors.index.json");
    EXPECT_EQ(index["metadata"]["total_size"], done->output_bytes);
    for (const auto& [name, bytes] : tree) {
      if (!name.ends_with(".safetensors")) continue;
      const auto header = read_safetensors_header(*memory_file(name, bytes));
      ASSERT_TRUE(header.ok());
      int64_t data_bytes = 0;
      for (const TensorInfo& tensor : header->tensors) {
        data_bytes += tensor.bytes;
        EXPECT_EQ(tensor.begin % dtype_bytes(tensor.dtype), 0) << tensor.name;
        EXPECT_EQ(index["weight_map"][tensor.name], name);
      }
      // One source tensor, its codes with its scales, is never split.
      if (header->tensors.size() > 3) {
        EXPECT_LE(data_bytes, size);
      }
    }
  }
}

TEST_F(QuantizeTest, ProgressEndsAtTheTotal) {
  QuantizeOptions job = options();
  job.threads = 3;
  JobProgress last;
  job.progress = [&](const JobProgress& progress) {
    EXPECT_GT(progress.done_bytes, last.done_bytes);
    last = progress;
  };
  const auto done = quantize_model(source_files(), job);
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(last.done_bytes, done->source_bytes);
  EXPECT_EQ(last.total_bytes, done->source_bytes);
  EXPECT_EQ(last.found_bytes, 0);
}

}  // namespace
}  // namespace nibble
