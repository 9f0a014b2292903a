// Which devices the tensor-core kernels run on, from the bytes of shared memory alone.
#include "ops/cuda/moe_formats.h"

#include <gtest/gtest.h>

#include <array>

#include "ops/backends.h"

namespace nibble::testing {
namespace {

constexpr int64_t kHopper = 227 << 10, kGb10 = 99 << 10;

TEST(SharedMemory, ProductsInTilesWantWhatHopperHas) {
  EXPECT_EQ(cuda::why_no_tiles(kHopper), "");
  EXPECT_EQ(cuda::why_no_tiles(kHopper - 1),
            "a block needs 232448 bytes of shared memory, the device gives it 232447");
  EXPECT_EQ(cuda::why_no_tiles(kGb10),
            "a block needs 232448 bytes of shared memory, the device gives it 101376");
}

TEST(SharedMemory, ExpertsFitSmallerDevices) {
  Random random(71);
  for (MatrixFormat format : {MatrixFormat::kNvfp4, MatrixFormat::kMxfp4}) {
    TestMatrix gate(random, format, 32, 64), up(random, format, 32, 64), down(random, format, 64, 32);
    const std::array experts = {ExpertWeights{.gate = gate.matrix, .up = up.matrix, .down = down.matrix}};
    auto decide = [&](int64_t shared_bytes) {
      std::string why;
      const cuda::TensorCores can = cuda::tensor_cores_for(experts, shared_bytes, why);
      EXPECT_EQ(why.empty(), can == cuda::TensorCores::kYes) << why;
      return std::pair(can, why);
    };
    EXPECT_EQ(decide(kHopper).first, cuda::TensorCores::kYes);
    EXPECT_EQ(decide(kGb10).first, cuda::TensorCores::kYes);
    const auto [can, why] = decide(64 << 10);
    EXPECT_EQ(can, cuda::TensorCores::kNo);
    EXPECT_NE(why.find("the device gives it 65536"), std::string::npos) << why;
  }
}

}  // namespace
}  // namespace nibble::testing
