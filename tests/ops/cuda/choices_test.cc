// What the cuda backend chooses and says of a device, without one.
#include "ops/cuda/choices.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace nibble::testing {
namespace {

std::string lines_of(const cuda::Device& device, const char* tensor_cores = "", bool graphs = true,
                     const cuda::MoePaths& paths = {}) {
  std::string text;
  for (const std::string& line : cuda::choices(device, tensor_cores, graphs, paths)) text += line + "\n";
  return text;
}
bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

const cuda::Device kHopper = {.name = "H200", .compiled_for = 90, .shared_bytes = 227 << 10},
                   kGb10 = {.compiled_for = 121, .shared_bytes = 99 << 10},
                   kLittle = {.compiled_for = 121, .shared_bytes = 64 << 10},
                   kAmpere = {.compiled_for = 80, .shared_bytes = 163 << 10},
                   kHopperWithCodeForAmpere = {.compiled_for = 80, .shared_bytes = 227 << 10};

TEST(Choices, FollowTheDevice) {
  const std::string hopper = lines_of(kHopper), gb10 = lines_of(kGb10);
  // wgmma is said of the device that is here.
  EXPECT_TRUE(has(hopper, "products with BF16 (kept in 12 bits ")) << hopper;
  EXPECT_TRUE(has(hopper, "where their exponents allow): tensor cores, mma.sync for ")) << hopper;
  for (const char* what : {"NVFP4", "GGUF NVFP4", "GGUF MXFP4", "GGUF Q4_0"}) {
    EXPECT_TRUE(has(hopper, fmt::format("\nproducts with {}: tensor cores, mma.sync for ", what))) << hopper;
    EXPECT_TRUE(has(hopper, fmt::format("\nrouted experts in {}: tensor cores", what))) << hopper;
  }
  EXPECT_TRUE(has(hopper, "up to 8 rows are routed and grouped in the same launch")) << hopper;
  EXPECT_TRUE(has(hopper, "in the launch of routed experts of 4 bits for 5 to 64 rows")) << hopper;
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
    for (const char* what :
         {"products with BF16: ", "products with NVFP4: ", "products with MXFP4: ", "products with q4: ",
          "routed experts in q4: ", "routed experts in NVFP4: ", "routed experts in MXFP4: "})
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
  const std::string portable = lines_of(kHopper, "", true, {.path = "portable"});
  EXPECT_TRUE(has(portable, "routed experts in NVFP4: float32 kernels: moe-path portable\n")) << portable;
  EXPECT_FALSE(has(portable, "shared expert")) << portable;
}

int most_few(const CudaOptions& options, bool wgmma = true, cuda::TileKind kind = cuda::TileKind::kNvfp4) {
  const cuda::MoeShape layer = {.experts = 256, .model = 3072, .width = 1024, .kind = kind};
  return make_moe_paths(kHopper, wgmma, options)->choose(layer, 10).most_few;
}

TEST(MoePath, ForcedOrByRule) {
  EXPECT_EQ(most_few({}), 204);
  EXPECT_EQ(most_few({}, false), INT_MAX);
  EXPECT_EQ(most_few({.moe_path = "few"}), INT_MAX);
  EXPECT_EQ(most_few({.moe_path = "many"}), 0);
  EXPECT_EQ(make_moe_paths(kHopper, true, {.tensor_cores = "off"})->path, "portable");
  auto refused = [](const CudaOptions& o) { return make_moe_paths(kHopper, false, o).status().message(); };
  EXPECT_EQ(refused({.moe_path = "many"}), "moe-path many: no wgmma in this build for H200; take auto");
  EXPECT_EQ(refused({"off", "few"}),
            "moe-path few: tensor cores are off (for moe-arith w4a4, too); take auto");
}

TEST(MoePath, AsMeasuredOnTheDevice) {
  const std::string file = ::testing::TempDir() + "nibble_moe_paths_" + std::to_string(::getpid());
  const std::string layer = ": NVFP4, 10 of 256 experts, 3072 x 1024";
  const CudaOptions options = {.moe_paths_file = file};
  auto write = [&](const std::string& text) { std::ofstream(file) << text; };
  write("{\"H200" + layer + "\": 96, \"L4" + layer + "\": 7, \"H200: \\u001b\": 8}");
  EXPECT_EQ(most_few(options), 96);
  EXPECT_EQ(most_few(options, true, cuda::TileKind::kQ4), 204);
  EXPECT_EQ(most_few({.moe_path = "many", .moe_paths_file = file}), 0);
  const cuda::MoePaths paths = make_moe_paths(kHopper, true, options).value();
  EXPECT_TRUE(has(lines_of(kHopper, "", true, paths), "average (rule)\n"));
  EXPECT_TRUE(
      has(lines_of(kHopper, "", true, paths), "H200" + layer + ": wgmma for more than 96 rows (measured)\n"));
  for (const char* no : {"L4", "\x1b"}) EXPECT_FALSE(has(lines_of(kHopper, "", true, paths), no));
  // Broken: one line that names the file, and the rule.
  std::vector<std::string> texts = {"", "[]", "{\"H200", std::string(100, '['), std::string(2 << 20, ' ')};
  for (const char* value :
       {"-1", "1048577", "18446744073709551615", "1e30", "96.0", "\"96\"", "null", "[96]"})
    texts.push_back("{\"H200" + layer + "\": " + value + "}");
  for (const std::string& text : texts) {
    write(text);
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(most_few(options), 204) << text.substr(0, 99);
    const std::string warning = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(warning.find("nibble: warning: " + file), 0) << warning;
    EXPECT_EQ(std::count(warning.begin(), warning.end(), '\n'), 1) << warning;
  }
  std::filesystem::remove(file);
  EXPECT_EQ(most_few(options), 204);
}

}  // namespace
}  // namespace nibble::testing
