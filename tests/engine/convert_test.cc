// nibble convert: codes and scales keep their bits, and the converted model gives the logits of its source.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/numbers.h"
#include "engine/model_source.h"
#include "golden_file.h"
#include "model/gguf_families.h"

namespace nibble {
namespace {

class Convert : public testing::Test {
 protected:
  Convert() {
    const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(testing::TempDir()) / ("nibble_convert_" + std::string(test.name()));
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    for (int32_t i = 0; i < 20; ++i) ids_.push_back((i * 53 + 7) % 384);
  }
  ~Convert() override { std::filesystem::remove_all(root_); }

  std::string path(const std::string& name) const { return (root_ / name).string(); }

  Result<ConvertSummary> convert(const FileSystem& files, const std::string& source,
                                 const std::string& destination, int64_t max_shard_bytes = 1 << 30,
                                 bool requantize = false) const {
    auto model = ModelSource::open(files, source);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return (*model)->convert({.source = source,
                              .destination = path(destination),
                              .threads = 2,
                              .max_shard_bytes = max_shard_bytes,
                              .version = "1",
                              .requantize = requantize});
  }

  std::vector<float> logits(const std::string& directory) const {
    return load_test_model(directory, "reference", options_for(20)).logits(ids_, ids_.size());
  }
  std::vector<float> logits(const std::shared_ptr<Gguf>& gguf) const {
    const ModelSpec spec = load_gguf_spec(*gguf).value();
    return load_test_model(std::make_unique<GgufWeights>(gguf, spec), spec, "reference", options_for(20))
        .logits(ids_, ids_.size());
  }

  std::filesystem::path root_;
  std::vector<int32_t> ids_;
};

std::string bytes_of(Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo* info = checkpoint.info(name);
  if (info == nullptr) return "(missing)";
  std::string bytes(static_cast<size_t>(info->bytes), '\0');
  EXPECT_TRUE(checkpoint.read_at(*info, 0, std::as_writable_bytes(std::span(bytes))).ok());
  return std::string(dtype_name(info->dtype)) + format_shape(info->shape) + bytes;
}

Checkpoint open_checkpoint(const std::string& directory) {
  return Checkpoint::open(FileSystem::posix(), directory).value();
}

double worst_error(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0, error = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(b[i])));
    error = std::max(error, std::fabs(static_cast<double>(a[i]) - b[i]));
  }
  return error / largest;
}

// laguna-ct and laguna-nvfp4 are one model in two layouts.
TEST_F(Convert, CompressedTensorsGivesTheGoldenModelOptCheckpoint) {
  const std::string source = golden_directory("laguna-ct"), golden = golden_directory("laguna-nvfp4");
  const auto done = convert(FileSystem::posix(), source, "dst");
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_EQ(done->kept, 192);
  EXPECT_EQ(done->decoded + done->requantized, 0);
  Checkpoint ours = open_checkpoint(path("dst")), wanted = open_checkpoint(golden);
  ASSERT_EQ(ours.tensors().size(), wanted.tensors().size());
  int64_t scales = 0;
  for (const TensorInfo* tensor : wanted.tensors()) {
    if (!tensor->name.ends_with(".weight_scale_2")) {
      EXPECT_TRUE(bytes_of(ours, tensor->name) == bytes_of(wanted, tensor->name)) << tensor->name;
      continue;
    }
    // The source has the reciprocal rounded to float32; its reciprocal again may be the neighbour.
    ++scales;
    const float scale = ours.floats(tensor->name, {}).value().at(0),
                original = wanted.floats(tensor->name, {}).value().at(0);
    EXPECT_EQ(1.0f / scale, 1.0f / original) << tensor->name;
    EXPECT_LE(std::fabs(scale - original), std::nextafter(original, 2.0f) - original) << tensor->name;
  }
  EXPECT_EQ(scales, 192);
  EXPECT_TRUE(logits(path("dst")) == logits(source));
  EXPECT_LT(worst_error(logits(path("dst")), logits(golden)), 1e-6);
  const auto config = nlohmann::json::parse(std::ifstream(path("dst") + "/config.json"));
  EXPECT_EQ(config["quantization_config"]["quant_method"], "modelopt");
  EXPECT_EQ(config["quantization_config"]["quant_algo"], "NVFP4");  // every matrix has its input_scale
  EXPECT_TRUE(std::filesystem::exists(path("dst") + "/hf_quant_config.json"));
}

TEST_F(Convert, GoesOnWhereItEnded) {
  const std::string source = golden_directory("laguna-ct");
  ASSERT_TRUE(convert(FileSystem::posix(), source, "whole", 300'000).ok());
  // The last shard's source cannot be read at its end.
  FaultyFileSystem files(&FileSystem::posix());
  const std::string last = source + "/model-00003-of-00003.safetensors";
  files.fail_read_at(last, static_cast<int64_t>(std::filesystem::file_size(last)) - 1);
  EXPECT_FALSE(convert(files, source, "dst", 300'000).ok());
  EXPECT_FALSE(std::filesystem::exists(path("dst") + "/config.json"));
  const auto done = convert(FileSystem::posix(), source, "dst", 300'000);
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_GT(done->resumed_shards, 0);
  EXPECT_LT(done->resumed_shards, done->shards);
  Checkpoint ours = open_checkpoint(path("dst")), whole = open_checkpoint(path("whole"));
  ASSERT_EQ(ours.tensors().size(), whole.tensors().size());
  for (const TensorInfo* tensor : whole.tensors())
    EXPECT_TRUE(bytes_of(ours, tensor->name) == bytes_of(whole, tensor->name)) << tensor->name;
}

TEST_F(Convert, WhatCannotBeConvertedIsNamed) {
  FaultyFileSystem files;
  files.add_file("plain/config.json", "{}");
  files.add_file("plain/model.safetensors",
                 SafetensorsWriter().add("a.weight", "F32", {1, 1}, std::string(4, '\0')).file());
  EXPECT_NE(convert(files, "plain", "dst").status().message().find("plain: nothing to convert"),
            std::string::npos);
  files.add_file("mx/config.json", "{}");
  files.add_file("mx/model.safetensors", SafetensorsWriter()
                                             .add("a.weight_packed", "U8", {1, 16}, std::string(16, '\0'))
                                             .add("a.weight_scale", "U8", {1, 1}, std::string(1, '\x7f'))
                                             .file());
  EXPECT_NE(convert(files, "mx", "dst")
                .status()
                .message()
                .find("'a.weight_packed': MXFP4 of compressed-tensors has no layout of ModelOpt's"),
            std::string::npos);
  const auto float_bytes = [](float value) { return number_bytes(std::bit_cast<uint32_t>(value)); };
  const auto with = [&](const std::string& name, float value) {
    files.add_file("ct/config.json", "{}");
    files.add_file("ct/model.safetensors", SafetensorsWriter()
                                               .add("a.weight_packed", "U8", {1, 8}, std::string(8, '\x11'))
                                               .add("a.weight_scale", "F8_E4M3", {1, 1}, "\x38")
                                               .add("a.weight_global_scale", "F32", {1}, float_bytes(2))
                                               .add(name, "F32", {1}, float_bytes(value))
                                               .file());
    return convert(files, "ct", "dst").status().message();
  };
  // The reciprocal is not finite; and what is there twice afterwards.
  EXPECT_NE(with("a.input_global_scale", 1e-45f).find("'a.input_global_scale': wanted one value"),
            std::string::npos);
  for (const char* name : {"a.weight_scale_2", "a.input_scale"})
    EXPECT_NE(with(name, 1).find(std::string("'") + name + "': its matrix is of compressed-tensors"),
              std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(path("dst")));
  // An unset variable of a script does not stand for where one is.
  const std::string source = golden_directory("laguna-ct");
  const auto unnamed =
      ModelSource::open(FileSystem::posix(), source).value()->convert({.source = source, .destination = ""});
  EXPECT_EQ(unnamed.status().message(), "destination '': wanted a directory");
}

class ConvertGguf : public Convert, public testing::WithParamInterface<Family> {
 protected:
  // GGUF of the family's model, in the blocks that its checkpoint has.
  std::string write_gguf(const Edit& edit = {}) {
    const Family& family = GetParam();
    spec_ = spec_of_text(config_of(family));
    RecordedTensors tensors = recorded(family, spec_, checkpoint_);
    if (is_llama(family)) tensors = interleaved(std::move(tensors), 32);
    GgufWriter writer;
    family.metadata(writer);
    add_tensors(writer, tensors, family.ffn_norm, is_llama(family) ? Packing::kF32 : Packing::kAsStored);
    std::vector<std::string> tokens;
    for (int i = 0; i < 384; ++i) tokens.push_back("t" + std::to_string(i));
    writer.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "qwen2");
    writer.texts("tokenizer.ggml.tokens", tokens).texts("tokenizer.ggml.merges", {});
    writer.text("tokenizer.chat_template", "{{ eos_token }}");
    if (edit) edit(writer);
    const std::string file = path("model.gguf");
    std::ofstream(file, std::ios::binary) << writer.file();
    return file;
  }

  ModelSpec spec_;
  std::unique_ptr<WeightSource> checkpoint_;
};

TEST_P(ConvertGguf, GivesTheLogitsOfTheFileAndTheBitsOfTheCheckpoint) {
  const std::string file = write_gguf();
  const auto done = convert(FileSystem::posix(), file, "dst", 400'000);
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_EQ(done->decoded + done->requantized, 0);
  EXPECT_GT(done->shards, 1);
  auto gguf = Gguf::open(FileSystem::posix(), file);
  ASSERT_TRUE(gguf.ok());
  const std::vector<float> wanted = logits(std::make_shared<Gguf>(std::move(gguf).value()));
  if (is_llama(GetParam())) {
    EXPECT_LT(worst_error(logits(path("dst")), wanted), 1e-5);  // sums over heads in the order of halves
  } else {
    EXPECT_TRUE(logits(path("dst")) == wanted);
  }
  const std::unique_ptr<ModelSource> model = ModelSource::open(FileSystem::posix(), path("dst")).value();
  EXPECT_EQ(model->spec()->eos, (std::vector<int32_t>{2}));
  EXPECT_EQ(model->tokenizer()->vocab_size(), 384);
  EXPECT_EQ(model->chat()->render(nlohmann::ordered_json::array(), true).value(), "t2");
  EXPECT_EQ(model->generation(384)->end_tokens, (std::vector<int32_t>{2}));

  if (GetParam().golden == nullptr || is_llama(GetParam())) {
    EXPECT_EQ(done->kept, 0);
    return;
  }
  Checkpoint ours = open_checkpoint(path("dst")),
             golden = open_checkpoint(golden_directory(GetParam().golden));
  int64_t compared = 0;
  for (const TensorInfo* tensor : golden.tensors()) {
    if (tensor->name.find("experts") == std::string::npos || tensor->name.ends_with("correction_bias") ||
        tensor->name.ends_with("_bias"))
      continue;
    EXPECT_TRUE(bytes_of(ours, tensor->name) == bytes_of(golden, tensor->name)) << tensor->name;
    ++compared;
  }
  EXPECT_GT(compared, 10);
  const auto config = nlohmann::json::parse(std::ifstream(path("dst") + "/config.json"));
  if (ours.has("model.layers.1.mlp.experts.0.down_proj.input_scale")) {
    EXPECT_EQ(config["quantization_config"]["quant_algo"], "NVFP4");
  }
  // Of biases and other vectors the values.
  for (const TensorInfo* tensor : golden.tensors()) {
    if (tensor->shape.size() > 2 || !tensor->name.ends_with("bias")) continue;
    EXPECT_TRUE(ours.floats(tensor->name, tensor->shape).value() ==
                golden.floats(tensor->name, tensor->shape).value())
        << tensor->name;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, ConvertGguf, testing::ValuesIn(families()), name_of);

// One matrix in blocks that have no equivalent.
class ConvertBlocks : public ConvertGguf {
 protected:
  static std::string q8_blocks(int64_t count) {
    std::string blocks;
    for (int64_t i = 0; i < count; ++i) {
      blocks += std::string("\x00\x20", 2);  // 2^-7
      for (int j = 0; j < 32; ++j) blocks += static_cast<char>((i * 7 + j * 13) % 17 - 8);
    }
    return blocks;
  }
};

TEST_P(ConvertBlocks, BecomeBf16OrNvfp4) {
  const Edit edit = [](GgufWriter& w) {
    // Divisors of 1 scale nothing.
    w.tensor("rope_freqs.weight", {16}, kGgufF32, nibble::bytes_of(std::vector<float>(16, 1)));
  };
  const std::string file = write_gguf(edit);
  // The down projection of layer 1 again, as Q8_0.
  const std::string name = "blk.1.ffn_down.weight";
  std::ifstream in(file, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  const size_t at = bytes.find(string_bytes(name));
  ASSERT_NE(at, std::string::npos);
  // Dims (u32 count, two u64), then the type: the same place holds fewer bytes of Q8_0 than of F32.
  const size_t type_at = at + 8 + name.size() + 4 + 16;
  const uint64_t offset = [&] {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + type_at + 4, 8);
    return value;
  }();
  bytes.replace(type_at, 4, number_bytes(8u));
  auto header = read_gguf_header(*memory_file("m", bytes));
  ASSERT_TRUE(header.ok()) << header.status().message();
  const auto tensor = std::find_if(header->tensors.begin(), header->tensors.end(),
                                   [&](const GgufTensorInfo& t) { return t.name == name; });
  const std::string blocks = q8_blocks(128 * 256 / 32);
  ASSERT_EQ(tensor->bytes, std::ssize(blocks)) << offset;
  bytes.replace(static_cast<size_t>(tensor->begin), blocks.size(), blocks);
  std::ofstream(file, std::ios::binary) << bytes;

  const std::string down = "model.layers.1.mlp.down_proj";
  std::vector<float> exact(256);
  const auto bf16 = convert(FileSystem::posix(), file, "bf16");
  ASSERT_TRUE(bf16.ok()) << bf16.status().message();
  EXPECT_EQ(bf16->decoded, 1);
  Checkpoint plain = open_checkpoint(path("bf16"));
  const Matrix decoded = plain.matrix(down, 128, 256).value();
  EXPECT_EQ(decoded.format, MatrixFormat::kBF16);
  const auto four = convert(FileSystem::posix(), file, "nvfp4", 1 << 30, /*requantize=*/true);
  ASSERT_TRUE(four.ok()) << four.status().message();
  EXPECT_EQ(four->requantized, 1);
  Checkpoint packed = open_checkpoint(path("nvfp4"));
  const Matrix quantized = packed.matrix(down, 128, 256).value();
  EXPECT_EQ(quantized.format, MatrixFormat::kNvfp4);
  std::vector<float> a(256), b(256);
  for (int64_t row = 0; row < 128; ++row) {
    dequantize_gguf_row(GgufType::kQ8_0,
                        reinterpret_cast<const uint8_t*>(blocks.data()) + row * (256 / 32 * 34), 256,
                        exact.data());
    dequantize_row(decoded, row, a.data());
    dequantize_row(quantized, row, b.data());
    EXPECT_TRUE(a == exact) << row;  // small whole multiples of a power of two
    EXPECT_LT(worst_error(b, exact), 0.13) << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Llama, ConvertBlocks, testing::Values(families().back()), name_of);

}  // namespace
}  // namespace nibble
