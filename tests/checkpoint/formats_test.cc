// Formats that quantizers write beside NVFP4: MXFP4, q4, FP8, and experts stacked in one tensor.
#include <cstring>
#include <functional>
#include <limits>

#include "checkpoint/test_models.h"

namespace nibble {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kExperts = 2, kStackedRows = 6, kStackedColumns = 64;  // gate and up: 3 rows each

std::string bytes(size_t count, int first, int step, int modulus = 256) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += static_cast<char>((first + step * static_cast<int>(i)) % modulus);
  return out;
}

std::string bf16s(size_t count) {
  std::vector<uint16_t> values;
  for (size_t i = 0; i < count; ++i) values.push_back(float_to_bf16(static_cast<float>(i) - 7.5f));
  return bytes_of(values);
}

// `mx` MXFP4, `q4`, `fp8` with one scale, `blocks` FP8 in blocks [130, 200], and the stacked `gate_up`
// (MXFP4) and `plain` (BF16) with biases.
SafetensorsWriter all_formats() {
  SafetensorsWriter writer;
  const std::vector<float> block_scales = {0.5f, 2.0f, -1.0f, 4.0f};
  writer.add("mx.weight_packed", "U8", {3, 32}, bytes(96, 5, 7))
      .add("mx.weight_scale", "U8", {3, 2}, bytes(6, 120, 3))
      .add("q4.weight_q4", "U32", {3, 2, 4}, bytes(96, 9, 11))
      .add("q4.weight_scale", "F16", {3, 2}, bytes_of(std::vector<uint16_t>(6, float_to_f16(0.75f))))
      .add("fp8.weight", "F8_E4M3", {3, 5}, bytes(15, 0x28, 3, 0x7F))
      .add("fp8.weight_scale", "F32", {}, f32(0.5f))
      .add("fp8.input_scale", "F32", {}, f32(3.0f))
      .add("blocks.weight", "F8_E4M3", {130, 200}, bytes(130 * 200, 0, 1, 0x7F))
      .add("blocks.weight_scale_inv", "F32", {2, 2}, bytes_of(block_scales))
      .add("gate_up_blocks", "U8", {kExperts, kStackedRows, 2, 16},
           bytes(kExperts * kStackedRows * kStackedColumns / 2, 3, 13))
      .add("gate_up_scales", "U8", {kExperts, kStackedRows, 2}, bytes(kExperts * kStackedRows * 2, 118, 1))
      .add("gate_up_bias", "BF16", {kExperts, kStackedRows}, bf16s(kExperts * kStackedRows))
      .add("plain", "BF16", {kExperts, 5, kStackedRows}, bf16s(kExperts * 5 * kStackedRows));
  return writer;
}

std::vector<float> row(const Matrix& matrix, int64_t n) {
  std::vector<float> out(static_cast<size_t>(matrix.k));
  dequantize_row(matrix, n, out.data());
  return out;
}

uint8_t byte_at(const std::string& text, size_t at) { return static_cast<uint8_t>(text[at]); }

TEST(Formats, Mxfp4) {
  Checkpoint checkpoint = opened(all_formats());
  Result<Matrix> matrix = checkpoint.matrix("mx", 3, 64);
  ASSERT_TRUE(matrix.ok()) << matrix.status().message();
  EXPECT_EQ(matrix->format, MatrixFormat::kMxfp4);
  EXPECT_EQ(matrix->tensor_scale, 1.0f);
  // Row 1, column 37 by hand: byte 32 + 18, high nibble; scale 2 + 1.
  EXPECT_EQ(row(*matrix, 1)[37],
            e2m1_to_float(byte_at(bytes(96, 5, 7), 50) >> 4) * e8m0_to_float(byte_at(bytes(6, 120, 3), 3)));
}

TEST(Formats, Q4) {
  Checkpoint checkpoint = opened(all_formats());
  Result<Matrix> matrix = checkpoint.matrix("q4", 3, 64);
  ASSERT_TRUE(matrix.ok()) << matrix.status().message();
  EXPECT_EQ(matrix->format, MatrixFormat::kQ4);
  // Row 2, column 41: element 9 of its block's words, that is word 1, bits 4..7, in little-endian bytes.
  uint32_t word = 0;
  std::memcpy(&word, bytes(96, 9, 11).data() + (2 * 2 + 1) * 16 + 4, 4);
  const int nibble = static_cast<int>(word >> 4 & 15);
  EXPECT_EQ(row(*matrix, 2)[41], static_cast<float>(nibble >= 8 ? nibble - 16 : nibble) * 0.75f);
}

TEST(Formats, Fp8) {
  Checkpoint checkpoint = opened(all_formats());
  Result<Matrix> matrix = checkpoint.matrix("fp8", 3, 5);
  ASSERT_TRUE(matrix.ok()) << matrix.status().message();
  EXPECT_EQ(matrix->format, MatrixFormat::kF8E4M3);
  EXPECT_EQ(matrix->tensor_scale, 0.5f);
  EXPECT_EQ(row(*matrix, 2)[1], e4m3_to_float(byte_at(bytes(15, 0x28, 3, 0x7F), 11)) * 0.5f);
  // The one scale may be stored as [1].
  SafetensorsWriter writer = all_formats();
  Checkpoint other = opened(writer.replace("fp8.weight_scale", "F32", {1}, f32(0.25f)));
  EXPECT_EQ(other.matrix("fp8", 3, 5)->tensor_scale, 0.25f);
}

TEST(Formats, Fp8Blocks) {
  Checkpoint checkpoint = opened(all_formats());
  Result<Matrix> matrix = checkpoint.matrix("blocks", 130, 200);
  ASSERT_TRUE(matrix.ok()) << matrix.status().message();
  EXPECT_EQ(matrix->format, MatrixFormat::kFp8Block);
  auto code = [](int64_t n, int64_t k) { return e4m3_to_float(static_cast<uint8_t>((n * 200 + k) % 0x7F)); };
  EXPECT_EQ(row(*matrix, 127)[127], code(127, 127) * 0.5f);
  EXPECT_EQ(row(*matrix, 127)[128], code(127, 128) * 2.0f);
  EXPECT_EQ(row(*matrix, 128)[127], code(128, 127) * -1.0f);
  EXPECT_EQ(row(*matrix, 129)[199], code(129, 199) * 4.0f);
}

TEST(Formats, StackedMxfp4) {
  Checkpoint checkpoint = opened(all_formats());
  Result<std::vector<Matrix>> all =
      checkpoint.stacked("gate_up", kExperts, kStackedRows, kStackedColumns, RowSplit::kAll);
  ASSERT_TRUE(all.ok()) << all.status().message();
  Result<std::vector<Matrix>> gate =
      checkpoint.stacked("gate_up", kExperts, kStackedRows / 2, kStackedColumns, RowSplit::kEven);
  Result<std::vector<Matrix>> up =
      checkpoint.stacked("gate_up", kExperts, kStackedRows / 2, kStackedColumns, RowSplit::kOdd);
  ASSERT_TRUE(gate.ok() && up.ok());
  ASSERT_EQ(gate->size(), size_t{kExperts});
  for (size_t e = 0; e < kExperts; ++e) {
    EXPECT_EQ((*gate)[e].format, MatrixFormat::kMxfp4);
    for (int64_t n = 0; n < kStackedRows / 2; ++n) {
      EXPECT_EQ(row((*gate)[e], n), row((*all)[e], 2 * n));
      EXPECT_EQ(row((*up)[e], n), row((*all)[e], 2 * n + 1));
    }
  }
  // Expert 1, row 4, column 33 by hand: block row 10.
  const std::string codes = bytes(kExperts * kStackedRows * kStackedColumns / 2, 3, 13);
  EXPECT_EQ(row((*all)[1], 4)[33],
            e2m1_to_float(byte_at(codes, 10 * 32 + 16) >> 4) * e8m0_to_float(118 + 10 * 2 + 1));
  // No copy where nothing is split; views stay where they are when the checkpoint moves.
  EXPECT_EQ((*all)[0].codes, checkpoint.tensor("gate_up_blocks", Shape{2, 6, 2, 16})->bytes.data());
  const std::vector<float> before = row((*up)[1], 2);
  Checkpoint moved = std::move(checkpoint);
  EXPECT_EQ(row((*up)[1], 2), before);
}

TEST(Formats, StackedPlainIsTransposed) {
  SafetensorsWriter writer = all_formats();
  std::vector<float> wide;
  for (int i = 0; i < kExperts * 5 * kStackedRows; ++i) wide.push_back(static_cast<float>(i) - 7.5f);
  writer.add("wide", "F32", {kExperts, 5, kStackedRows}, bytes_of(wide));
  Checkpoint checkpoint = opened(writer);
  for (const auto& [name, format] : {std::pair{"plain", MatrixFormat::kBF16}, {"wide", MatrixFormat::kF32}}) {
    for (RowSplit split : {RowSplit::kAll, RowSplit::kEven, RowSplit::kOdd}) {
      const int64_t step = split == RowSplit::kAll ? 1 : 2, n = kStackedRows / step;
      Result<std::vector<Matrix>> matrices = checkpoint.stacked(name, kExperts, n, 5, split);
      ASSERT_TRUE(matrices.ok()) << matrices.status().message();
      for (int64_t e = 0; e < kExperts; ++e) {
        const Matrix& matrix = (*matrices)[static_cast<size_t>(e)];
        EXPECT_EQ(matrix.format, format);
        for (int64_t r = 0; r < n; ++r) {
          for (int64_t c = 0; c < 5; ++c) {
            const int64_t at = (e * 5 + c) * kStackedRows + r * step + (split == RowSplit::kOdd ? 1 : 0);
            EXPECT_EQ(row(matrix, r)[static_cast<size_t>(c)], static_cast<float>(at) - 7.5f);
          }
        }
      }
    }
  }
}

TEST(Formats, StackedBiases) {
  Checkpoint checkpoint = opened(all_formats());
  auto biases = [&](int64_t n, RowSplit split) {
    return *checkpoint.stacked_bias("gate_up", kExperts, n, split);
  };
  EXPECT_EQ(biases(3, RowSplit::kEven), (std::vector<float>{-7.5f, -5.5f, -3.5f, -1.5f, 0.5f, 2.5f}));
  EXPECT_EQ(biases(3, RowSplit::kOdd), (std::vector<float>{-6.5f, -4.5f, -2.5f, -0.5f, 1.5f, 3.5f}));
  EXPECT_EQ(biases(6, RowSplit::kAll).size(), 12u);
  EXPECT_EQ(biases(6, RowSplit::kAll)[11], 3.5f);
}

TEST(Formats, EverythingIsUsed) {
  Checkpoint checkpoint = opened(all_formats());
  EXPECT_TRUE(checkpoint.matrix("mx", 3, 64).ok() && checkpoint.matrix("q4", 3, 64).ok());
  EXPECT_TRUE(checkpoint.matrix("fp8", 3, 5).ok() && checkpoint.matrix("blocks", 130, 200).ok());
  EXPECT_TRUE(checkpoint.stacked("gate_up", 2, 6, 64, RowSplit::kAll).ok());
  EXPECT_TRUE(checkpoint.stacked("plain", 2, 3, 5, RowSplit::kOdd).ok());
  EXPECT_TRUE(checkpoint.stacked_bias("gate_up", 2, 3, RowSplit::kOdd).ok());
  EXPECT_EQ(checkpoint.unused(), std::vector<std::string>{});
}

TEST(Formats, FilesThatCannotBeMappedAndUnalignedOnes) {
  FaultyFileSystem files;
  files.add_file(kFile, all_formats().pad(1).file());
  files.refuse_map(kFile);
  Result<Checkpoint> read = Checkpoint::open(files, "m");
  ASSERT_TRUE(read.ok());
  Checkpoint mapped = opened(all_formats());
  EXPECT_EQ(row(*read->matrix("q4", 3, 64), 2), row(*mapped.matrix("q4", 3, 64), 2));
  EXPECT_EQ(row(*read->matrix("blocks", 130, 200), 129), row(*mapped.matrix("blocks", 130, 200), 129));
  EXPECT_EQ(row((*read->stacked("gate_up", 2, 3, 64, RowSplit::kOdd))[1], 2),
            row((*mapped.stacked("gate_up", 2, 3, 64, RowSplit::kOdd))[1], 2));
}

TEST(Formats, Errors) {
  using Change = std::function<void(SafetensorsWriter&)>;
  using Ask = std::function<Status(Checkpoint&)>;
  struct Case {
    Change change;
    Ask ask;
    std::vector<std::string> fragments;
  };
  auto matrix = [](const char* name, int64_t n, int64_t k) -> Ask {
    return [=](Checkpoint& c) { return c.matrix(name, n, k).status(); };
  };
  auto stacked = [](const char* name, int64_t experts, int64_t n, int64_t k) -> Ask {
    return [=](Checkpoint& c) { return c.stacked(name, experts, n, k, RowSplit::kOdd).status(); };
  };
  auto with = [](const char* name, const char* dtype, Shape shape, std::string bytes) -> Change {
    return [=](SafetensorsWriter& writer) { writer.replace(name, dtype, shape, bytes); };
  };
  auto without = [](const char* name) -> Change { return [=](SafetensorsWriter& w) { w.remove(name); }; };
  const Change nothing = [](SafetensorsWriter&) {};
  std::string bad_e8m0 = bytes(6, 120, 3), bad_stacked = bytes(24, 118, 1), bad_fp8 = bytes(15, 0, 1);
  bad_e8m0[3] = bad_stacked[21] = bad_fp8[7] = static_cast<char>(0xFF);
  std::vector<uint16_t> bad_f16(6, 0x3C00);
  bad_f16[4] = 0xFC00;
  const std::vector<Case> cases = {
      {nothing, matrix("mx", 3, 48), {"'mx.weight_packed'", "MXFP4 wants", "multiple of 32, found 48"}},
      {nothing, matrix("mx", 4, 64), {"'mx.weight_packed': wanted U8 [4, 32], found U8 [3, 32]"}},
      {with("mx.weight_scale", "U8", {3, 4}, bytes(12, 0, 1)),
       matrix("mx", 3, 64),
       {"'mx.weight_scale': wanted U8 [3, 2], found U8 [3, 4]"}},
      {with("mx.weight_scale", "U8", {3, 2}, bad_e8m0),
       matrix("mx", 3, 64),
       {"'mx.weight_scale'", "row 1, column 1 is NaN (byte 0xff)"}},
      {nothing, matrix("q4", 3, 40), {"'q4.weight_q4'", "q4 wants", "multiple of 32, found 40"}},
      {nothing, matrix("q4", 3, -64), {"'q4.weight_q4'", "found -64"}},
      {nothing, matrix("q4", 3, 96), {"'q4.weight_q4': wanted U32 [3, 3, 4], found U32 [3, 2, 4]"}},
      {without("q4.weight_scale"),
       matrix("q4", 3, 64),
       {"'q4.weight_scale': is missing, and 'q4.weight_q4' (U32) needs it"}},
      {with("q4.weight_scale", "BF16", {3, 2}, bytes_of(bad_f16)),
       matrix("q4", 3, 64),
       {"'q4.weight_scale': wanted F16 [3, 2], found BF16 [3, 2]"}},
      {with("q4.weight_scale", "F16", {3, 2}, bytes_of(bad_f16)),
       matrix("q4", 3, 64),
       {"'q4.weight_scale'", "row 2, column 0 is -inf"}},
      {[](SafetensorsWriter& w) { w.add("q4.weight", "U8", {1}, "x"); },
       matrix("q4", 3, 64),
       {"'q4.weight_q4'", "'q4.weight' too; which one counts?"}},
      {with("fp8.weight", "F8_E4M3", {3, 5}, bad_fp8),
       matrix("fp8", 3, 5),
       {"'fp8.weight'", "row 1, column 2 is NaN (byte 0xff)"}},
      {without("fp8.weight_scale"),
       matrix("fp8", 3, 5),
       {"'fp8.weight_scale': is missing, and 'fp8.weight' (F8_E4M3) needs it"}},
      {with("fp8.weight_scale", "F32", {3, 1}, std::string(12, '\0')),
       matrix("fp8", 3, 5),
       {"'fp8.weight_scale': wanted F32 [], found F32 [3, 1]"}},
      {with("fp8.weight_scale", "F32", {}, f32(kNan)), matrix("fp8", 3, 5), {"'fp8.weight_scale'", "nan"}},
      {with("fp8.weight_scale", "F32", {}, f32(-1)), matrix("fp8", 3, 5), {"at least 0", "found -1"}},
      {nothing, matrix("fp8", 5, 3), {"'fp8.weight': wanted F8_E4M3 [5, 3], found F8_E4M3 [3, 5]"}},
      {with("blocks.weight_scale_inv", "F32", {2, 2}, f32(1) + f32(2) + f32(kInf) + f32(1)),
       matrix("blocks", 130, 200),
       {"'blocks.weight_scale_inv'", "row 1, column 0 is inf"}},
      {with("blocks.weight_scale_inv", "F32", {1, 2}, f32(1) + f32(2)),
       matrix("blocks", 130, 200),
       {"'blocks.weight_scale_inv': wanted F32 [2, 2], found F32 [1, 2]"}},
      {nothing, stacked("gate", 2, 3, 64), {"'gate_blocks': is missing", "'gate_up_bl"}},
      {nothing,
       stacked("gate_up", 3, 3, 64),
       {"'gate_up_blocks': wanted U8 [3, 6, 2, 16], found U8 [2, 6, 2, 16]"}},
      {nothing, stacked("gate_up", 2, 6, 64), {"wanted U8 [2, 12, 2, 16]"}},
      {nothing, stacked("gate_up", 2, int64_t{1} << 62, 64), {"'gate_up_blocks': wanted U8 [2, -1, 2, 16]"}},
      {nothing, stacked("gate_up", int64_t{1} << 62, 3, 64), {"'gate_up_blocks'", "found U8 [2, 6, 2, 16]"}},
      {nothing, stacked("gate_up", -1, 3, 64), {"'gate_up_blocks'", "found U8 [2, 6, 2, 16]"}},
      {nothing, stacked("gate_up", 2, 3, 48), {"'gate_up_blocks'", "multiple of 32, found 48"}},
      {without("gate_up_scales"),
       stacked("gate_up", 2, 3, 64),
       {"'gate_up_scales': is missing, and 'gate_up_blocks' (U8) needs it"}},
      {with("gate_up_scales", "U8", {2, 6, 2}, bad_stacked),
       stacked("gate_up", 2, 3, 64),
       {"'gate_up_scales'", "row 10, column 1 is NaN (byte 0xff)"}},
      {[](SafetensorsWriter& w) { w.add("gate_up", "BF16", {1}, "xy"); },
       stacked("gate_up", 2, 3, 64),
       {"'gate_up_blocks'", "'gate_up' too; which one counts?"}},
      {nothing,
       stacked("plain", 2, 3, 6),
       {"'plain': wanted BF16, F16 or F32 [2, 6, 6], found BF16 [2, 5, 6]"}},
      {nothing, stacked("plain", -2, 3, 5), {"'plain': wanted BF16, F16 or F32 [-2, 5, 6]"}},
      {nothing,
       [](Checkpoint& c) { return c.stacked_bias("gate_up", 2, 6, RowSplit::kEven).status(); },
       {"'gate_up_bias': wanted BF16, F16 or F32 [2, 12], found BF16 [2, 6]"}},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.fragments.back());
    SafetensorsWriter writer = all_formats();
    bad.change(writer);
    Checkpoint checkpoint = opened(writer);
    const Status status = bad.ask(checkpoint);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), ErrorCode::kUser);
    for (const std::string& fragment : bad.fragments)
      EXPECT_NE(status.message().find(fragment), std::string::npos)
          << status.message() << "\nlacks " << fragment;
  }
}

}  // namespace
}  // namespace nibble
