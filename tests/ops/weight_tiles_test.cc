// The cpu's weight tiles against their description, and rows in fixed point against theirs.
#include "ops/cpu/weight_tiles.h"

#include "ops/backends.h"

namespace nibble::testing {
namespace {

constexpr MatrixFormat kTileFormats[] = {MatrixFormat::kNvfp4, MatrixFormat::kMxfp4, MatrixFormat::kQ4};

// Column k of row n, at the place that weight_tiles.h describes.
float read_tile(const Matrix& m, const std::vector<uint8_t>& tiles, int64_t n, int64_t k) {
  const MatrixFormatInfo& info = matrix_format_info(m.format);
  const int64_t columns = info.scale_columns, blocks = m.k / columns, lane = n % 16;
  const int64_t block_bytes = 16 * (columns / 2 + info.scale_bytes);
  const int64_t group = k / 128, first = group * (128 / columns), block = k / columns - first;
  const int64_t in_group = std::min(128 / columns, blocks - first);
  const uint8_t* at = tiles.data() + (n / 16 * blocks + first) * block_bytes;
  const uint8_t* scale = at + (block * 16 + lane) * info.scale_bytes;
  const uint8_t* codes = at + in_group * 16 * info.scale_bytes + block * 8 * columns;
  // Four bytes hold 8 columns.
  const uint8_t* byte = codes + k % columns / 8 * 64 + lane * 4 + k % 8 / 2;
  // A row that repeats the code everywhere.
  const uint8_t code = (k % 2 == 0 ? *byte : *byte >> 4) & 15u;
  const std::vector<uint8_t> row(static_cast<size_t>(columns / 2), static_cast<uint8_t>(code | (code << 4)));
  std::vector<float> values(static_cast<size_t>(columns));
  info.decode(row.data(), scale, columns, values.data());
  return values[0];
}

TEST(WeightTiles, HoldEveryWeightWhereTheDescriptionSays) {
  Random random(61);
  for (MatrixFormat format : kTileFormats) {
    for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 32}, {16, 128}, {21, 160}, {50, 416}}) {
      TestMatrix w(random, format, n, k);
      std::vector<uint8_t> tiles(static_cast<size_t>(cpu::tile_bytes(format, n, k)), 0xEE);
      const int64_t count = (n + 15) / 16;
      for (int64_t tile = 0; tile < count; ++tile) cpu::make_tiles(w.matrix, tile, tile + 1, tiles.data());
      std::vector<float> wanted(static_cast<size_t>(k));
      for (int64_t row = 0; row < count * 16; ++row) {
        if (row < n) dequantize_row(w.matrix, row, wanted.data());
        for (int64_t c = 0; c < k; ++c) {
          ASSERT_EQ(read_tile(w.matrix, tiles, row, c), row < n ? wanted[static_cast<size_t>(c)] : 0.0f)
              << matrix_format_name(format) << ", row " << row << ", column " << c;
        }
      }
      EXPECT_EQ(std::ssize(tiles), matrix_bytes(format, count * 16, k));
    }
  }
}

// Every weight by a row that picks it out: what GGUF's blocks say, all scale codes of its NVFP4 among them.
TEST(WeightTiles, HoldBlocksOfGgufExactly) {
  Random random(64);
  using enum MatrixFormat;
  for (auto [format, tiles] : {std::pair{kGgufNvfp4, kNvfp4}, {kGgufMxfp4, kMxfp4}, {kGgufQ4_0, kQ4}}) {
    constexpr int64_t kRows = 37, kColumns = 448;
    TestMatrix w(random, format, kRows, kColumns);
    if (format == kGgufNvfp4) {
      for (size_t i = 0; i < w.codes.size(); ++i) {
        if (i % 36 < 4) w.codes[i] = static_cast<uint8_t>(i / 36 * 4 + i % 36);
      }
    }
    EXPECT_EQ(cpu::tile_format(format), tiles);
    EXPECT_EQ(matrix_bytes(format, 16, kColumns), matrix_bytes(tiles, 16, kColumns));
    RowsBuffer x(kColumns, kColumns), out(kColumns, kRows);
    for (int64_t r = 0; r < kColumns; ++r) {
      std::fill_n(x.view().row(r), kColumns, 0.0f);
      x.view().row(r)[r] = 1.0f;
    }
    std::vector<float> wanted(kColumns);
    for (const BackendCase& backend : all_backends()) {
      const std::unique_ptr<OnHostData> ops = make_ops(backend);
      ops->linear(x.view(), w.matrix, out.view());
      if (backend.tensor_cores()) {
        EXPECT_EQ(ops->ops().place(w.matrix).value().format, tiles);
      }
      for (int64_t n = 0; n < kRows; ++n) {
        dequantize_row(w.matrix, n, wanted.data());
        for (int64_t k = 0; k < kColumns; ++k)
          ASSERT_EQ(out.view().row(k)[n], wanted[static_cast<size_t>(k)])
              << backend << ", " << matrix_format_name(format);
      }
    }
  }
}

// Powers of two from the smallest subnormal to the largest number, one weight of 1 at a time: what fixed
// point keeps of each column is as FixedGroup says.
// What cannot be tiles, or may not, is multiplied as it lies, to the accuracy of other weights.
void expect_formula(OnHostData& ops, const TestMatrix& w, RowsBuffer& x, const std::string& where) {
  const Matrix& m = w.matrix;
  RowsBuffer out(x.view().rows, m.n);
  ops.linear(x.view(), m, out.view());
  std::vector<float> weights(static_cast<size_t>(m.k));
  Judge judge(where);
  for (int64_t n = 0; n < m.n; ++n) {
    dequantize_row(m, n, weights.data());
    for (int64_t t = 0; t < x.view().rows; ++t) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < m.k; ++i) {
        const double product = static_cast<double>(x.view().row(t)[i]) * weights[static_cast<size_t>(i)];
        sum += product;
        magnitude += std::fabs(product);
      }
      judge.check(out.read().row(t)[n], sum, (static_cast<double>(m.k) / 16 + 10) * kEpsilon * magnitude,
                  "row " + std::to_string(t) + ", column " + std::to_string(n));
    }
  }
}

TEST(RowMajor, LargeScalesOfMxfp4) {
  Random random(65);
  for (MatrixFormat format : {MatrixFormat::kMxfp4, MatrixFormat::kGgufMxfp4}) {
    for (uint8_t exponent : {uint8_t{118}, uint8_t{119}, uint8_t{124}}) {
      TestMatrix w(random, format, 37, 160);
      uint8_t& scale = format == MatrixFormat::kMxfp4 ? w.scales[7] : w.codes[7 * 17];
      scale = static_cast<uint8_t>(127 + exponent);
      EXPECT_EQ(cpu::can_be_tiles(w.matrix), exponent <= 118) << matrix_format_name(format);
      RowsBuffer x = RowsBuffer::random(random, 5, 160);
      for (int64_t t = 0; t < 5; ++t) {
        for (int64_t i = 0; i < 160; ++i) x.view().row(t)[i] *= 0x1p-10f;
      }
      for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
        const std::unique_ptr<OnHostData> ops = make_ops({"cpu", kernels->isa});
        expect_formula(*ops, w, x, std::string(kernels->isa) + "_2^" + std::to_string(exponent));
      }
    }
  }
}

TEST(RowMajor, WeightsThatStayWhereTheyLie) {
  Random random(66);
  using enum MatrixFormat;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kGgufNvfp4, kGgufMxfp4, kGgufQ4_0}) {
    TestMatrix w(random, format, 37, 1152, 0.3f);
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      const std::unique_ptr<OnHostData> ops = make_ops({"cpu", kernels->isa});
      EXPECT_TRUE(ops->ops().copies_weights(format));
      ASSERT_TRUE(ops->ops().use_host_weights());
      EXPECT_FALSE(ops->ops().copies_weights(format));
      const Matrix placed = ops->ops().place(w.matrix).value();
      EXPECT_TRUE(placed.codes == w.matrix.codes && placed.scales == w.matrix.scales && !placed.tiled);
      for (int64_t rows : {1, 9}) {
        RowsBuffer x = RowsBuffer::random(random, rows, 1152);
        expect_formula(*ops, w, x, std::string(kernels->isa) + "_" + std::string(matrix_format_name(format)));
      }
    }
  }
}

TEST(FixedRows, KeepEveryColumnToAShareOfTheLargest) {
  Random random(62);
  constexpr int64_t kColumns = 160;
  TestMatrix w(random, MatrixFormat::kMxfp4, kColumns, kColumns);
  std::fill(w.scales.begin(), w.scales.end(), 127);
  std::fill(w.codes.begin(), w.codes.end(), 0);
  for (int64_t i = 0; i < kColumns; ++i)
    w.codes[static_cast<size_t>((i * kColumns + i) / 2)] = i % 2 == 0 ? 0x02 : 0x20;
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    const std::unique_ptr<OnHostData> ops = make_ops({"cpu", kernels->isa});
    for (int exponent = -149; exponent < 127; exponent += 3) {
      RowsBuffer x(1, kColumns), out(1, kColumns);
      double largest[2] = {};
      for (int64_t i = 0; i < kColumns; ++i) {
        const float value = std::ldexp(random.normal(), exponent - static_cast<int>(random.below(20)));
        x.view().row(0)[i] = std::clamp(value, -0x1p127f, 0x1p127f);
        largest[i / 128] = std::max(largest[i / 128], std::fabs(static_cast<double>(x.view().row(0)[i])));
      }
      ops->linear(x.view(), w.matrix, out.view());
      for (int64_t i = 0; i < kColumns; ++i) {
        const double wanted = x.view().row(0)[i], found = out.view().row(0)[i];
        ASSERT_LE(std::fabs(found - wanted), std::max(largest[i / 128] * 0x1p-22, 0x1p-149))
            << kernels->isa << ", 2^" << exponent << ", column " << i;
      }
    }
  }
}

TEST(FixedRows, WhatIsNoNumberStaysSoAndDisturbsNoOtherRow) {
  Random random(63);
  for (MatrixFormat format : kTileFormats) {
    TestMatrix w(random, format, 40, 288);
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      const std::unique_ptr<OnHostData> ops = make_ops({"cpu", kernels->isa});
      for (float bad : {kNaN, INFINITY, -INFINITY}) {
        RowsBuffer x = RowsBuffer::random(random, 9, 288), wanted(9, 40), out(9, 40);
        ops->linear(x.view(), w.matrix, wanted.view());
        x.view().row(4)[200] = bad;
        ops->linear(x.view(), w.matrix, out.view());
        for (int64_t r = 0; r < 9; ++r) {
          for (int64_t n = 0; n < 40; ++n) {
            if (r == 4) {
              EXPECT_FALSE(std::isfinite(out.view().row(r)[n])) << kernels->isa << ", " << n;
            } else {
              EXPECT_EQ(out.view().row(r)[n], wanted.view().row(r)[n]);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace nibble::testing
