#include "checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "checkpoint/test_models.h"
#include "places.h"

namespace nibble {
namespace {

std::vector<std::vector<float>> rows(const Matrix& matrix) {
  std::vector<std::vector<float>> all(static_cast<size_t>(matrix.n),
                                      std::vector<float>(static_cast<size_t>(matrix.k)));
  for (int64_t n = 0; n < matrix.n; ++n) dequantize_row(matrix, n, all[static_cast<size_t>(n)].data());
  return all;
}

TEST(Checkpoint, BothNvfp4DialectsAreEqual) {
  Checkpoint checkpoint = opened(good_model());
  Result<Matrix> modelopt = checkpoint.matrix("mo", kRows, kColumns);
  ASSERT_TRUE(modelopt.ok()) << modelopt.status().message();
  Result<Matrix> packed = checkpoint.matrix("ct", kRows, kColumns);
  ASSERT_TRUE(packed.ok()) << packed.status().message();
  EXPECT_EQ(modelopt->format, MatrixFormat::kNvfp4);
  EXPECT_EQ(modelopt->tensor_scale, 0.25f);
  EXPECT_EQ(packed->tensor_scale, 0.25f);
  EXPECT_EQ(rows(*modelopt), rows(*packed));
  // Row 1, column 19, by hand: its byte is number 16 + 9, high nibble; its block scale number 2 + 1.
  const auto byte = static_cast<uint8_t>(codes()[25]);
  const auto scale = static_cast<uint8_t>(block_scales()[3]);
  EXPECT_EQ(rows(*modelopt)[1][19], e2m1_to_float(byte >> 4) * e4m3_to_float(scale) * 0.25f);
  EXPECT_EQ(checkpoint.unused(), (std::vector<std::string>{"norm.weight", "plain.weight"}));
}

TEST(Checkpoint, ScalarsAsVectorsAndWithoutInputScales) {
  SafetensorsWriter writer = good_model();
  writer.replace("mo.weight_scale_2", "F32", {1}, f32(0.25f)).remove("mo.input_scale");
  writer.replace("ct.weight_global_scale", "F32", {}, f32(4.0f)).remove("ct.input_global_scale");
  Checkpoint checkpoint = opened(writer);
  EXPECT_TRUE(checkpoint.matrix("mo", kRows, kColumns).ok());
  EXPECT_TRUE(checkpoint.matrix("ct", kRows, kColumns).ok());
}

TEST(Checkpoint, PlainMatrices) {
  const std::vector<float> values = {-2.5f, -1.5f, -0.5f, 0.5f, 1.5f, 2.5f};
  std::vector<uint16_t> f16;
  for (float value : values) f16.push_back(float_to_f16(value));
  SafetensorsWriter writer = good_model();
  writer.add("half.weight", "F16", {2, 3}, bytes_of(f16));
  writer.add("full.weight", "F32", {2, 3}, bytes_of(values));
  Checkpoint checkpoint = opened(writer);
  const std::array<std::pair<const char*, MatrixFormat>, 3> kinds = {
      {{"plain", MatrixFormat::kBF16}, {"half", MatrixFormat::kF16}, {"full", MatrixFormat::kF32}}};
  for (const auto& [name, format] : kinds) {
    Result<Matrix> matrix = checkpoint.matrix(name, 2, 3);
    ASSERT_TRUE(matrix.ok()) << matrix.status().message();
    EXPECT_EQ(matrix->format, format);
    EXPECT_EQ(rows(*matrix), (std::vector<std::vector<float>>{{-2.5f, -1.5f, -0.5f}, {0.5f, 1.5f, 2.5f}}));
  }
}

TEST(Checkpoint, FloatsOfAllThreeDTypes) {
  const std::vector<float> values = {-2.5f, 0.0f, 1.5f};
  std::vector<uint16_t> bf16, f16;
  for (float value : values) {
    bf16.push_back(float_to_bf16(value));
    f16.push_back(float_to_f16(value));
  }
  SafetensorsWriter writer;
  writer.add("a", "BF16", {3}, bytes_of(bf16)).add("b", "F16", {3}, bytes_of(f16));
  writer.add("c", "F32", {3}, bytes_of(values)).add("none", "F32", {0}, "").add("one", "F32", {}, f32(7));
  Checkpoint checkpoint = opened(writer);
  for (const char* name : {"a", "b", "c"}) {
    Result<std::vector<float>> floats = checkpoint.floats(name, Shape{3});
    ASSERT_TRUE(floats.ok()) << floats.status().message();
    EXPECT_EQ(*floats, values);
  }
  EXPECT_EQ(*checkpoint.floats("none", Shape{0}), std::vector<float>{});
  EXPECT_EQ(*checkpoint.floats("one", Shape{}), std::vector<float>{7});
  EXPECT_TRUE(checkpoint.unused().empty());
}

// The data starts anywhere; whatever the address, views are aligned for their dtype and hold the same values.
TEST(Checkpoint, UnalignedFiles) {
  for (size_t spaces = 0; spaces < 8; ++spaces) {
    SafetensorsWriter writer = good_model();
    Checkpoint checkpoint = opened(writer.pad(spaces));
    EXPECT_EQ(*checkpoint.floats("norm.weight", Shape{4}), (std::vector<float>{1, 2, 3, 4}));
    Result<Matrix> matrix = checkpoint.matrix("plain", 2, 3);
    ASSERT_TRUE(matrix.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(matrix->codes) % 2, 0u);
    EXPECT_EQ(rows(*matrix)[1][0], 0.5f);
    Result<TensorView> view = checkpoint.tensor("norm.weight", Shape{4});
    ASSERT_TRUE(view.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view->bytes.data()) % 4, 0u);
    EXPECT_TRUE(checkpoint.matrix("ct", kRows, kColumns).ok());
  }
}

TEST(Checkpoint, FilesThatCannotBeMapped) {
  FaultyFileSystem files;
  files.add_file(kFile, good_model().file());
  Result<Checkpoint> mapped = Checkpoint::open(files, "m");
  files.refuse_map(kFile);
  Result<Checkpoint> copied = Checkpoint::open(files, "m");
  ASSERT_TRUE(mapped.ok() && copied.ok());
  for (const char* name : {"mo", "ct"}) {
    EXPECT_EQ(rows(*mapped->matrix(name, kRows, kColumns)), rows(*copied->matrix(name, kRows, kColumns)));
  }
  // Asked twice, read once; and moving the checkpoint leaves views valid.
  Result<TensorView> first = copied->tensor("plain.weight", Shape{2, 3});
  Result<TensorView> second = copied->tensor("plain.weight", Shape{2, 3});
  EXPECT_EQ(first->bytes.data(), second->bytes.data());
  Checkpoint moved = std::move(*copied);
  EXPECT_EQ(moved.tensor("plain.weight", Shape{2, 3})->bytes.data(), first->bytes.data());
}

TEST(Checkpoint, InfoOfTensors) {
  Checkpoint checkpoint = opened(good_model());
  EXPECT_EQ(checkpoint.directory(), "m");
  EXPECT_TRUE(checkpoint.has("ct.weight_packed"));
  EXPECT_FALSE(checkpoint.has("ct.weight"));
  EXPECT_EQ(checkpoint.info("ct.weight"), nullptr);
  EXPECT_EQ(checkpoint.info("plain.weight")->shape, (Shape{2, 3}));
  EXPECT_EQ(checkpoint.file_of("plain.weight"), kFile);
  EXPECT_EQ(checkpoint.file_of("ct.weight"), "m");
  EXPECT_EQ(checkpoint.tensors().size(), 10u);
  EXPECT_EQ(checkpoint.total_bytes(), std::ssize(good_model().data()));
  EXPECT_EQ(checkpoint.unused().size(), 10u);
  checkpoint.ignore("norm.weight");
  checkpoint.ignore("not there");
  EXPECT_EQ(checkpoint.unused().size(), 9u);
}

TEST(Checkpoint, ModelOptZeroScaleIsAnAllZeroMatrix) {
  SafetensorsWriter writer = good_model();
  Checkpoint checkpoint = opened(writer.replace("mo.weight_scale_2", "F32", {}, f32(0)));
  Result<Matrix> matrix = checkpoint.matrix("mo", kRows, kColumns);
  ASSERT_TRUE(matrix.ok()) << matrix.status().message();
  EXPECT_EQ(matrix->tensor_scale, 0.0f);
}

TEST(Checkpoint, Shards) {
  Result<Checkpoint> checkpoint = Checkpoint::open(Shards().files(), "m");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(*checkpoint->floats("a", Shape{1}), std::vector<float>{1});
  EXPECT_EQ(*checkpoint->floats("b", Shape{1}), std::vector<float>{2});
  EXPECT_EQ(checkpoint->file_of("b"), "m/s2.safetensors");
}

TEST(Checkpoint, OneFileGoesBeforeShards) {
  FaultyFileSystem files = Shards().files();
  files.add_file(kFile, good_model().file());
  Result<Checkpoint> checkpoint = Checkpoint::open(files, "m");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_TRUE(checkpoint->has("mo.weight"));
  EXPECT_FALSE(checkpoint->has("a"));
}

// The same on real files: what only the kernel can do.
TEST(Checkpoint, RealFiles) {
  const std::string directory =
      std::filesystem::path(::testing::TempDir()) / fmt::format("checkpoint_test_{}", ::getpid());
  std::filesystem::create_directories(directory);
  const std::string path = directory + "/model.safetensors";
  std::ofstream(path, std::ios::binary) << good_model().file();
  Result<Checkpoint> checkpoint = Checkpoint::open(FileSystem::posix(), directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_TRUE(checkpoint->matrix("ct", kRows, kColumns).ok());
  EXPECT_EQ(*checkpoint->floats("norm.weight", Shape{4}), (std::vector<float>{1, 2, 3, 4}));

  std::filesystem::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(Checkpoint::open(FileSystem::posix(), directory).status().message(),
            path + ": not a regular file");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_EQ(Checkpoint::open(FileSystem::posix(), directory).status().message(),
            path + ": not a regular file");
  std::filesystem::remove(path);
  std::ofstream(path, std::ios::binary).close();
  EXPECT_NE(Checkpoint::open(FileSystem::posix(), directory).status().message().find("0 bytes"),
            std::string::npos);
  std::filesystem::remove_all(directory);
  EXPECT_NE(Checkpoint::open(FileSystem::posix(), directory).status().message().find("no such directory"),
            std::string::npos);
}

// The model that ships with the sources: every matrix and vector of it loads and nothing is left over.
TEST(Checkpoint, DemoModel) {
  Result<Checkpoint> checkpoint = Checkpoint::open(FileSystem::posix(), demo_directory());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  int matrices = 0;
  for (const TensorInfo* tensor : checkpoint->tensors()) {
    const bool is_codes = tensor->dtype == DType::kU8;
    if (tensor->name.ends_with(".weight") && tensor->shape.size() == 2) {
      const std::string prefix = tensor->name.substr(0, tensor->name.size() - 7);
      Result<Matrix> matrix =
          checkpoint->matrix(prefix, tensor->shape[0], tensor->shape[1] * (is_codes ? 2 : 1));
      ASSERT_TRUE(matrix.ok()) << matrix.status().message();
      EXPECT_EQ(matrix->format == MatrixFormat::kNvfp4, is_codes);
      ++matrices;
    } else if (tensor->shape.size() == 1) {
      EXPECT_TRUE(checkpoint->floats(tensor->name, tensor->shape).ok());
    }
  }
  EXPECT_GT(matrices, 0);
  EXPECT_EQ(checkpoint->unused(), std::vector<std::string>{});
}

}  // namespace
}  // namespace nibble
