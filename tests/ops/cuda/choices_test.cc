// What the cuda backend says of a device, without one.
#include "ops/cuda/choices.h"

#include <gtest/gtest.h>

namespace nibble::testing {
namespace {

std::string lines_of(int64_t shared_bytes, const char* tensor_cores = "", bool graphs = true) {
  std::string text;
  for (const std::string& line : cuda::choices({.shared_bytes = shared_bytes}, tensor_cores, graphs))
    text += line + "\n";
  return text;
}
bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

constexpr int64_t kHopper = 227 << 10, kGb10 = 99 << 10;

TEST(Choices, FollowTheDevice) {
  const std::string hopper = lines_of(kHopper), gb10 = lines_of(kGb10);
  // wgmma is said of the device that is here.
  EXPECT_TRUE(has(hopper, "products with BF16: tensor cores, mma.sync for ")) << hopper;
  EXPECT_TRUE(has(hopper, "products with NVFP4: tensor cores, mma.sync for ")) << hopper;
  EXPECT_TRUE(has(hopper, "up to 8 rows are routed and grouped in the same launch")) << hopper;
  EXPECT_TRUE(has(hopper, "in the routed experts' launch for 5 to 64 rows")) << hopper;
  EXPECT_TRUE(has(gb10, "products with BF16: float32 kernels: a block needs 232448 bytes")) << gb10;
  EXPECT_TRUE(has(gb10, "routed experts in NVFP4: tensor cores")) << gb10;
  EXPECT_TRUE(has(gb10, "too little for routing and grouping few rows")) << gb10;
  EXPECT_FALSE(has(gb10, "shared expert")) << gb10;
  EXPECT_TRUE(has(lines_of(64 << 10), "routed experts in NVFP4: float32 kernels: a block needs "));
}

TEST(Choices, FollowTheOptions) {
  EXPECT_TRUE(has(lines_of(kHopper), "steps of few rows: recorded as graphs"));
  EXPECT_TRUE(has(lines_of(kHopper, "", false), "launch by launch, since graphs are off"));
  EXPECT_TRUE(has(lines_of(kHopper, "off"), "float32 kernels; tensor cores are off"));
  EXPECT_FALSE(has(lines_of(kHopper, "off"), "mma.sync"));
}

}  // namespace
}  // namespace nibble::testing
