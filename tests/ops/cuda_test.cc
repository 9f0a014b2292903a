// The cuda backend as such. Its operations are in the other files, where a GPU is: see all_backends().
#include "ops/backends.h"

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

}  // namespace
}  // namespace nibble::testing
