// What the cuda backend says of a device, without one.
#include "ops/cuda/choices.h"

#include <gtest/gtest.h>

namespace nibble::testing {
namespace {

std::string lines_of(const cuda::Device& device, const char* tensor_cores = "", bool graphs = true) {
  std::string text;
  for (const std::string& line : cuda::choices(device, tensor_cores, graphs)) text += line + "\n";
  return text;
}
bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

const cuda::Device kHopper = {.compiled_for = 90, .shared_bytes = 227 << 10},
                   kGb10 = {.compiled_for = 121, .shared_bytes = 99 << 10},
                   kLittle = {.compiled_for = 121, .shared_bytes = 64 << 10},
                   kAmpere = {.compiled_for = 80, .shared_bytes = 163 << 10},
                   kHopperWithCodeForAmpere = {.compiled_for = 80, .shared_bytes = 227 << 10};

TEST(Choices, FollowTheDevice) {
  const std::string hopper = lines_of(kHopper), gb10 = lines_of(kGb10);
  // wgmma is said of the device that is here.
  EXPECT_TRUE(has(hopper, "products with BF16 (kept in 12 bits ")) << hopper;
  EXPECT_TRUE(has(hopper, "where their exponents allow): tensor cores, mma.sync for ")) << hopper;
  EXPECT_TRUE(has(hopper, "products with NVFP4: tensor cores, mma.sync for ")) << hopper;
  EXPECT_TRUE(has(hopper, "up to 8 rows are routed and grouped in the same launch")) << hopper;
  EXPECT_TRUE(has(hopper, "in the routed experts' launch for 5 to 64 rows")) << hopper;
  EXPECT_TRUE(has(gb10, "products with BF16: float32 kernels: a block needs 232448 bytes")) << gb10;
  EXPECT_TRUE(has(gb10, "routed experts in NVFP4: tensor cores")) << gb10;
  EXPECT_TRUE(has(gb10, "too little for routing and grouping few rows")) << gb10;
  EXPECT_FALSE(has(gb10, "shared expert")) << gb10;
  EXPECT_TRUE(has(lines_of(kLittle), "routed experts in NVFP4: float32 kernels: a block needs "));
}

TEST(Choices, NothingIsOnTensorCoresBelowCapability9) {
  const std::string why =
      "float32 kernels: the kernels here are for compute capability 8.0, those on tensor cores want 9.0";
  for (const cuda::Device& device : {kAmpere, kHopperWithCodeForAmpere}) {
    const std::string lines = lines_of(device);
    for (const char* what : {"products with BF16: ", "products with NVFP4: ", "products with MXFP4: ",
                             "routed experts in NVFP4: ", "routed experts in MXFP4: "})
      EXPECT_TRUE(has(lines, what + why)) << lines;
    EXPECT_FALSE(has(lines, "mma.sync")) << lines;
    EXPECT_FALSE(has(lines, "shared expert")) << lines;
  }
}

TEST(Choices, TheDescriptionSaysWhatIsWithoutTensorCores) {
  EXPECT_EQ(cuda::without_tensor_cores(kHopper, ""), "");
  EXPECT_EQ(cuda::without_tensor_cores(kAmpere, "off"), "");
  EXPECT_TRUE(has(cuda::without_tensor_cores(kGb10, ""), "; without tensor cores but for experts: a block"));
  EXPECT_TRUE(has(cuda::without_tensor_cores(kLittle, ""), "; without tensor cores: a block needs"));
  EXPECT_TRUE(has(cuda::without_tensor_cores(kAmpere, ""), "; without tensor cores: the kernels here"));
}

TEST(Choices, FollowTheOptions) {
  EXPECT_TRUE(has(lines_of(kHopper), "steps of few rows: recorded as graphs"));
  EXPECT_TRUE(has(lines_of(kHopper, "", false), "launch by launch, since graphs are off"));
  EXPECT_TRUE(has(lines_of(kHopper, "off"), "float32 kernels; tensor cores are off"));
  EXPECT_FALSE(has(lines_of(kHopper, "off"), "mma.sync"));
}

}  // namespace
}  // namespace nibble::testing
