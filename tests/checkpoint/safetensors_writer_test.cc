#include "checkpoint/safetensors_writer.h"

#include <gtest/gtest.h>

#include <array>
#include <filesystem>

#include "base/file.h"
#include "base/thread_pool.h"

namespace nibble {
namespace {

std::vector<TensorInfo> mixed_tensors() {
  return {{.name = "bytes", .dtype = DType::kU8, .shape = {3, 5}},
          {.name = "scalar", .dtype = DType::kF32, .shape = {}},
          {.name = "none", .dtype = DType::kBF16, .shape = {0, 7}},
          {.name = "halves \"quoted\" \xC3\xA9", .dtype = DType::kBF16, .shape = {9}},
          {.name = "long", .dtype = DType::kI64, .shape = {2}},
          {.name = "more bytes", .dtype = DType::kF8E4M3, .shape = {1}}};
}

TEST(SafetensorsWriterTest, ReadsBackWhateverTheOrderOfWrites) {
  const std::string path = testing::TempDir() + "/nibble_writer.safetensors";
  const SafetensorsLayout layout = safetensors_layout(mixed_tensors());
  auto output = SafetensorsOutput::create(path, layout);
  ASSERT_TRUE(output.ok()) << output.status().message();
  auto byte_at = [](size_t tensor, int64_t i) {
    return static_cast<std::byte>(tensor * 50 + static_cast<size_t>(i));
  };
  struct Piece {
    size_t tensor;
    int64_t offset;
  };
  std::vector<Piece> pieces;
  for (size_t t = layout.tensors.size(); t-- > 0;) {
    for (int64_t i = layout.tensors[t].bytes; i-- > 0;) pieces.push_back({t, i});
  }
  ThreadPool pool(4);
  pool.parallel_for(std::ssize(pieces), [&](int64_t i) {
    const Piece piece = pieces[static_cast<size_t>(i)];
    const std::array<std::byte, 1> byte = {byte_at(piece.tensor, piece.offset)};
    EXPECT_TRUE(output->write(piece.tensor, piece.offset, byte).ok());
  });
  ASSERT_TRUE(output->finish().ok());

  auto file = FileSystem::posix().open(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->size_bytes(), layout.file_bytes);
  const auto header = read_safetensors_header(**file);
  ASSERT_TRUE(header.ok()) << header.status().message();
  ASSERT_EQ(header->tensors.size(), layout.tensors.size());
  for (const TensorInfo& read : header->tensors) {
    const auto at = std::find_if(layout.tensors.begin(), layout.tensors.end(),
                                 [&](const TensorInfo& tensor) { return tensor.name == read.name; });
    ASSERT_NE(at, layout.tensors.end()) << read.name;
    EXPECT_EQ(read.dtype, at->dtype);
    EXPECT_EQ(read.shape, at->shape);
    EXPECT_EQ(read.begin, at->begin);
    EXPECT_EQ(read.begin % dtype_bytes(read.dtype), 0) << read.name;
    std::vector<std::byte> bytes(static_cast<size_t>(read.bytes));
    ASSERT_TRUE((*file)->read_at(read.begin, bytes).ok());
    for (int64_t i = 0; i < read.bytes; ++i)
      EXPECT_EQ(bytes[static_cast<size_t>(i)], byte_at(static_cast<size_t>(at - layout.tensors.begin()), i));
  }
  std::filesystem::remove(path);
}

TEST(SafetensorsWriterTest, HeadIsAMultipleOfEight) {
  for (size_t length = 1; length < 20; ++length) {
    const SafetensorsLayout layout =
        safetensors_layout({{.name = std::string(length, 'x'), .dtype = DType::kU8, .shape = {3}}});
    EXPECT_EQ(layout.head.size() % 8, 0u);
    EXPECT_EQ(layout.tensors[0].begin, std::ssize(layout.head));
  }
}

TEST(SafetensorsWriterTest, WhereNothingCanBeWritten) {
  const auto output = SafetensorsOutput::create("/no/such/directory/x", safetensors_layout(mixed_tensors()));
  ASSERT_FALSE(output.ok());
  EXPECT_NE(output.status().message().find("/no/such/directory/x"), std::string::npos);
  // The device that is always full.
  const auto full = SafetensorsOutput::create("/dev/full", safetensors_layout(mixed_tensors()));
  ASSERT_FALSE(full.ok());
  EXPECT_NE(full.status().message().find("No space left"), std::string::npos) << full.status().message();
}

}  // namespace
}  // namespace nibble
