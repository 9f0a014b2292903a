// Which devices and weights the tensor-core kernels take, without a GPU: from the code that runs there
// and the bytes of shared memory alone, and weights that stay as they are need no more than memory, which is
// the host's here.
#include "ops/cuda/moe_formats.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <deque>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/log.h"
#include "ops/backends.h"
#include "ops/cuda/cuda_weights.h"
#include "ops/cuda/gguf_split.h"

namespace nibble::testing {
namespace {

const cuda::Device kHopper = {.compiled_for = 90, .shared_bytes = 227 << 10},
                   kGb10 = {.compiled_for = 121, .shared_bytes = 99 << 10},
                   kAmpere = {.compiled_for = 80, .shared_bytes = 163 << 10},
                   kHopperWithCodeForAmpere = {.compiled_for = 80, .shared_bytes = 227 << 10};

TEST(SharedMemory, ProductsInTilesWantWhatHopperHas) {
  EXPECT_EQ(cuda::why_no_tiles(kHopper), "");
  EXPECT_EQ(cuda::why_no_tiles({.compiled_for = 90, .shared_bytes = (227 << 10) - 1}),
            "a block needs 232448 bytes of shared memory, the device gives it 232447");
  EXPECT_EQ(cuda::why_no_tiles(kGb10),
            "a block needs 232448 bytes of shared memory, the device gives it 101376");
}

TEST(SharedMemory, ExpertsFitSmallerDevices) {
  Random random(71);
  using enum MatrixFormat;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kGgufNvfp4, kGgufMxfp4, kGgufQ4_0}) {
    TestMatrix gate(random, format, 64, 64), up(random, split_format(format), 64, 64),
        down(random, format, 64, 64);
    const std::array experts = {ExpertWeights{.gate = gate.matrix, .up = up.matrix, .down = down.matrix}};
    EXPECT_EQ(cuda::why_not_packed(experts, kHopper, {}), "");
    EXPECT_EQ(cuda::why_not_packed(experts, kGb10, {}), "");
    const std::string why =
        cuda::why_not_packed(experts, {.compiled_for = 121, .shared_bytes = 64 << 10}, {});
    EXPECT_NE(why.find("the device gives it 65536"), std::string::npos) << why;
  }
}

TEST(Experts, InBF16WantTheKernelsForMany) {
  using enum MatrixFormat;
  EXPECT_EQ(cuda::why_no_packing(kBF16, kHopper, {.has_wgmma = true}), "");
  EXPECT_EQ(cuda::why_no_packing(kBF16, kHopper, {}), "in BF16, whose kernels want wgmma");
  EXPECT_EQ(cuda::why_no_packing(kBF16, kHopper, {.path = "few", .has_wgmma = true}),
            "in BF16, whose kernels are those for many");
  const cuda::MoeShape shape = {.experts = 256, .chosen = 10, .kind = cuda::TileKind::kBF16};
  cuda::MoePaths paths = {.has_wgmma = true};
  EXPECT_EQ(paths.choose(shape, 10).most_few, 0);
  paths.crossovers = {{cuda::crossover_key("", shape), 96}};
  EXPECT_EQ(paths.choose(shape, 10).most_few, 0);
}

// Whatever memory they have: there the kernels are empty.
TEST(Capability, NothingIsOnTensorCoresBelow9) {
  constexpr const char* kWhy =
      "the kernels here are for compute capability 8.0, those on tensor cores want 9.0 or later";
  for (const cuda::Device& device : {kAmpere, kHopperWithCodeForAmpere}) {
    EXPECT_EQ(cuda::why_no_tiles(device), kWhy);
    EXPECT_EQ(cuda::why_no_packing(MatrixFormat::kNvfp4, device, {}), kWhy);
    EXPECT_EQ(cuda::why_no_packing(MatrixFormat::kMxfp4, device, {}), kWhy);
    EXPECT_EQ(cuda::why_no_packing(MatrixFormat::kQ4, device, {}), kWhy);
  }
  EXPECT_NE(cuda::why_no_tiles({.compiled_for = 89, .shared_bytes = 227 << 10}), "");
}

class Fallback : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(set_log_file(path_).ok()); }
  void TearDown() override {
    EXPECT_TRUE(set_log_file("/dev/null").ok());
    std::filesystem::remove(path_);
  }
  // The lines that were logged since the last call.
  std::string logged() {
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    std::filesystem::resize_file(path_, 0);
    return text.str();
  }
  // Small experts, all matrices of which are in the format.
  std::array<ExpertWeights, 2> experts(MatrixFormat format) {
    const Matrix& wide = keep(format, 32, 64);
    const Matrix& narrow = keep(format, 64, 32);
    return {ExpertWeights{.gate = wide, .up = wide, .down = narrow},
            {.gate = wide, .up = wide, .down = narrow}};
  }
  // One with a block scale that bfloat16 has no room for.
  Matrix wild_mxfp4(MatrixFormat format = MatrixFormat::kMxfp4, uint8_t scale = 200) {
    const Matrix wild = keep(format, 32, 64);
    TestMatrix& kept = matrices_.back();
    (kept.scales.empty() ? kept.codes[5 * 17] : kept.scales[5]) = scale;
    return wild;
  }
  static cuda::CudaWeights weights(const char* tensor_cores, const cuda::Device& device = kHopper,
                                   const char* path = "auto") {
    return {host_memory(), nullptr, device, tensor_cores, {.path = path}};
  }

 private:
  const Matrix& keep(MatrixFormat format, int64_t n, int64_t k) {
    return matrices_.emplace_back(random_, format, n, k).matrix;
  }
  Random random_{72};
  std::deque<TestMatrix> matrices_;
  std::string path_ = ::testing::TempDir() + "nibble_fallback_" + std::to_string(::getpid()) +
                      ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".log";
};

constexpr const char* kExpertsWarning =
    "nibble: warning: routed experts run without tensor cores, in float32, the slower the more rows a step "
    "has: in FP8, not in NVFP4, MXFP4, q4 or BF16\n";

TEST_F(Fallback, ExpertsInOtherFormatsAreWarnedOfOnce) {
  cuda::CudaWeights placing = weights("");
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_TRUE(placing.place_experts(experts(MatrixFormat::kF8E4M3), ExpertsOf::kModel).ok());
    EXPECT_EQ(logged(), layer == 0 ? kExpertsWarning : "");
  }
  EXPECT_TRUE(weights("off").place_experts(experts(MatrixFormat::kF8E4M3), ExpertsOf::kModel).ok());
  EXPECT_EQ(logged(), "");
}

TEST_F(Fallback, ExpertsThatCannotAreRefusedWhereTheyMust) {
  const auto placed = weights("on").place_experts(experts(MatrixFormat::kF8E4M3), ExpertsOf::kModel);
  ASSERT_FALSE(placed.ok());
  EXPECT_EQ(placed.status().code(), ErrorCode::kUser);
  EXPECT_EQ(placed.status().message(),
            "tensor-cores on: routed experts cannot be on them: in FP8, not in NVFP4, MXFP4, q4 or BF16");
}

TEST_F(Fallback, AForcedPathIsTaken) {
  cuda::CudaWeights few = weights("", kHopper, "few"), portable = weights("", kHopper, "portable");
  EXPECT_TRUE(few.place_experts(experts(MatrixFormat::kF8E4M3), ExpertsOf::kSelfTest).ok());
  EXPECT_EQ(few.place_experts(experts(MatrixFormat::kF8E4M3), ExpertsOf::kModel).status().message(),
            "moe-path few: not for these routed experts: in FP8, not in NVFP4, MXFP4, q4 or BF16; take auto");
  const auto placed = portable.place_experts(experts(MatrixFormat::kNvfp4), ExpertsOf::kModel);
  EXPECT_FALSE(static_cast<const cuda::CudaExperts&>(*placed.value()).tensor);
  EXPECT_EQ(logged(), "");
}

// It has experts in every format, with every option, and hides no warning of the model's.
TEST_F(Fallback, ASelfTestIsNeitherRefusedNorWarnedOf) {
  for (const char* tensor_cores : {"", "on"}) {
    cuda::CudaWeights placing = weights(tensor_cores);
    for (MatrixFormat format : {MatrixFormat::kF32, MatrixFormat::kF8E4M3})
      EXPECT_TRUE(placing.place_experts(experts(format), ExpertsOf::kSelfTest).ok());
    EXPECT_EQ(logged(), "");
    EXPECT_EQ(placing.place_experts(experts(MatrixFormat::kF8E4M3), ExpertsOf::kModel).ok(),
              *tensor_cores == 0);
    EXPECT_EQ(logged(), *tensor_cores == 0 ? kExpertsWarning : "");
  }
}

TEST_F(Fallback, MatricesThatGetNoTilesAreWarnedOfOnce) {
  const Matrix wild = wild_mxfp4();
  EXPECT_EQ(cuda::why_not_tiles(wild), "block scales outside of 2^-118 to 2^8");
  for (auto [scale, fits] : {std::pair{8, false}, {9, true}, {135, true}, {136, false}})
    EXPECT_EQ(cuda::why_not_tiles(wild_mxfp4(MatrixFormat::kGgufMxfp4, scale)).empty(), fits) << scale;
  std::array<ExpertWeights, 2> mixed = experts(MatrixFormat::kGgufMxfp4);
  mixed[1].down = experts(MatrixFormat::kGgufQ4_0)[1].down;
  EXPECT_EQ(cuda::why_not_packed(mixed, kHopper, {}), "in different formats");
  cuda::CudaWeights placing = weights("");
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(placing.place(wild, MatrixUse::kProducts).value().tiled);
    EXPECT_EQ(logged(), i > 0 ? ""
                              : "nibble: warning: weights in MXFP4 run without tensor cores, in float32, the "
                                "slower the more rows a step has: block scales outside of 2^-118 to 2^8\n");
  }
  // No kernels for the format, no products, none wanted: nothing to say.
  const Matrix fp8 = experts(MatrixFormat::kF8E4M3)[0].gate;
  EXPECT_FALSE(weights("").place(fp8, MatrixUse::kProducts).value().tiled);
  EXPECT_FALSE(weights("").place(wild, MatrixUse::kEmbedding).value().tiled);
  EXPECT_FALSE(weights("off").place(wild, MatrixUse::kProducts).value().tiled);
  EXPECT_EQ(logged(), "");
  // A device without room for the kernels.
  const Matrix nvfp4 = experts(MatrixFormat::kNvfp4)[0].gate;
  EXPECT_FALSE(weights("", kGb10).place(nvfp4, MatrixUse::kProducts).value().tiled);
  EXPECT_NE(logged().find("weights in NVFP4 run without tensor cores"), std::string::npos);
}

// Byte for byte, whatever the blocks hold.
TEST(GgufBlocks, AreSplitAsQuantDoes) {
  using enum MatrixFormat;
  constexpr int64_t kColumns = 64 << 10;
  Random random(73);
  for (MatrixFormat format : {kGgufNvfp4, kGgufMxfp4, kGgufQ4_0}) {
    TestMatrix from(random, format, 1, kColumns);
    for (uint8_t& byte : from.codes) byte = static_cast<uint8_t>(random.below(256));
    const cuda::GgufBlocks blocks(from.matrix);
    std::vector<uint8_t> wanted(from.codes.size()), found;
    uint8_t *codes = wanted.data(), *scales = codes + kColumns / 2;
    if (format == kGgufNvfp4) (void)repack_gguf_nvfp4_row(blocks.blocks, kColumns, codes, scales);
    if (format == kGgufMxfp4) repack_gguf_mxfp4_row(blocks.blocks, kColumns, codes, scales);
    if (format == kGgufQ4_0) repack_gguf_q4_0_row(blocks.blocks, kColumns, codes, scales);
    for (int64_t i = 0; i < blocks.bytes; ++i) found.push_back(blocks.split_byte(i));
    EXPECT_EQ(found, wanted) << matrix_format_name(format);
  }
}

TEST_F(Fallback, BelowCapability9WeightsStayAsTheyAre) {
  for (const cuda::Device& device : {kAmpere, kHopperWithCodeForAmpere}) {
    const std::array<ExpertWeights, 2> nvfp4 = experts(MatrixFormat::kNvfp4);
    cuda::CudaWeights placing = weights("", device);
    EXPECT_FALSE(placing.place(nvfp4[0].gate, MatrixUse::kProducts).value().tiled);
    const auto placed = placing.place_experts(nvfp4, ExpertsOf::kModel);
    EXPECT_FALSE(static_cast<const cuda::CudaExperts&>(*placed.value()).tensor);
    const std::string lines = logged();
    EXPECT_NE(lines.find("weights in NVFP4 run without tensor cores"), std::string::npos) << lines;
    EXPECT_NE(lines.find("routed experts run without tensor cores"), std::string::npos) << lines;
    EXPECT_NE(lines.find("those on tensor cores want 9.0 or later"), std::string::npos) << lines;
    const auto refused = weights("on", device).place_experts(nvfp4, ExpertsOf::kModel);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), ErrorCode::kUser);
  }
}

}  // namespace
}  // namespace nibble::testing
