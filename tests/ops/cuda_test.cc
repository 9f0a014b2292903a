// The cuda backend as such. Its operations are in the other files, where a GPU is: see all_backends().
#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/expert_layer.h"

namespace nibble::testing {
namespace {

TEST(Cuda, RunsHere) {
  if (!gpu_status().ok()) GTEST_SKIP() << "skipped: " << gpu_status().message();
  std::unique_ptr<Ops> ops = make_backend("cuda", {}).value();
  EXPECT_EQ(ops->name(), "cuda");
  EXPECT_NE(ops->description().find("compute capability"), std::string::npos) << ops->description();
}

// Without a GPU, or without CUDA in the build: a user's error, in one line.
TEST(Cuda, WhatIsMissingIsSaid) {
  if (gpu_status().ok()) return;
  EXPECT_EQ(gpu_status().code(), ErrorCode::kUser);
  EXPECT_NE(gpu_status().message().find("CUDA"), std::string::npos) << gpu_status().message();
}

TEST(Cuda, MemoryThatIsNotThereIsAnErrorWithTheNumbers) {
  if (!gpu_status().ok()) return;
  std::unique_ptr<Ops> ops = make_backend("cuda", {}).value();
  Result<Buffer> buffer = Buffer::allocate(ops->memory(), INT64_C(1) << 50, "too much");
  ASSERT_FALSE(buffer.ok());
  EXPECT_NE(buffer.status().message().find("too much: wanted 1"), std::string::npos)
      << buffer.status().message();
  // And the next operation works.
  EXPECT_TRUE(Buffer::allocate(ops->memory(), 64, "little").ok());
  TestMatrix w = [] {
    Random random(91);
    return TestMatrix(random, MatrixFormat::kF32, 4, 8);
  }();
  RowsBuffer x(1, 8), out(1, 4);
  std::fill_n(x.view().row(0), 8, 1.0f);
  OnHostData(std::move(ops)).linear(x.read(), w.matrix, out.view());
  EXPECT_FALSE(std::isnan(out.view().row(0)[3]));
}

TEST(Cuda, MoePathsGiveTheSameBits) {
  const auto forced = make_backend("cuda", {.moe_path = "many"});
  if (!forced.ok()) GTEST_SKIP() << "skipped: " << forced.status().message();
  using enum MatrixFormat;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kGgufMxfp4, kGgufQ4_0, kBF16}) {
    for (int64_t rows : {1, 9, 70, 200}) {
      Random random(92);
      const Layer layer(random, {7, 3, 416, 224, rows}, format, format);
      auto run = [&](const char* path) {
        OnHostData ops(make_backend("cuda", {.moe_path = path}).value());
        return expert_ffn(ops, layer);
      };
      for (const char* path : {"few", "many"}) {
        if (format == kBF16 && path == std::string("few")) continue;  // has but one
        EXPECT_TRUE(same_bits(run(path).read(), run("auto").read())) << path << ", rows " << rows;
      }
    }
  }
}

// To the host's ordinary memory and to that of its own, beyond what goes through a buffer between and not.
TEST(Cuda, DownloadsToBothKindsOfHostMemory) {
  if (!gpu_status().ok()) return;
  std::unique_ptr<Ops> ops = make_backend("cuda", {}).value();
  Memory& memory = ops->memory();
  for (size_t count : {size_t{25}, size_t{2} << 20}) {
    const auto bytes = static_cast<int64_t>(count * sizeof(int32_t));
    std::vector<int32_t> data(count), ordinary(count);
    std::iota(data.begin(), data.end(), 7);
    const Buffer device = Buffer::allocate(memory, bytes, "device").value(),
                 host = Buffer::allocate(memory.host_side(), bytes, "host").value();
    memory.upload(device.as<void>(), data.data(), bytes);
    memory.download(ordinary.data(), device.as<void>(), bytes);
    memory.download(host.as<void>(), device.as<void>(), bytes);
    EXPECT_EQ(ordinary, data);
    EXPECT_TRUE(std::equal(data.begin(), data.end(), host.as<int32_t>()));
  }
}

}  // namespace
}  // namespace nibble::testing
