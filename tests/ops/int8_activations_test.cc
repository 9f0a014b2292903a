// BackendOptions::cpu_activations: what is rounded, by how much, and that nothing else decides about a bit.
#include "ops/backends.h"
#include "ops/cpu/weight_tiles.h"
#include "ops/rounding_error.h"

namespace nibble::testing {
namespace {

class Int8Activations : public OnEveryBackend {
 protected:
  RowsBuffer run(const RowsBuffer& x, const Matrix& w) { return run(*ops_, x.view(), w); }
  static RowsBuffer run(OnHostData& ops, Rows<const float> x, const Matrix& w) {
    RowsBuffer out(x.rows, w.n, 3);
    ops.linear(x, w, out.view());
    EXPECT_TRUE(out.gaps_untouched());
    return out;
  }
  static bool rounds(MatrixFormat format, int64_t k) {
    if (format == MatrixFormat::kBF16)
      return (GetParam().variant == "avx512_bf16" || GetParam().variant == "amx") && k % 2 == 0;
    return cpu::tile_format(format).has_value();
  }
  // What is taken from each column of a row at most.
  static std::vector<double> lost(MatrixFormat format, const float* x, int64_t k) {
    std::vector<double> lost(static_cast<size_t>(k));
    if (!rounds(format, k)) return lost;
    for (int64_t begin = 0; begin < k; begin += 32) {
      const int64_t end = std::min(k, begin + 32);
      double largest = 0;
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(static_cast<double>(x[i])));
      for (int64_t i = begin; i < end; ++i) {
        const bool bf16 = format == MatrixFormat::kBF16;
        lost[static_cast<size_t>(i)] = bf16 ? std::fabs(static_cast<double>(x[i])) * 0x1p-8 : largest / 254;
      }
    }
    return lost;
  }

  std::unique_ptr<OnHostData> exact_ = make_ops({GetParam().name, GetParam().variant});
};

TEST_P(Int8Activations, AreOffByNoMoreThanTheirRounding) {
  Random random(81);
  for (MatrixFormat format : kFormats) {
    Judge judge("int8_" + std::string(matrix_format_name(format)));
    for (auto [n, columns] :
         {std::pair<int64_t, int64_t>{7, 16}, {17, 48}, {130, 63}, {33, 400}, {18, 1041}}) {
      const int64_t k = columns_for(format, columns);
      TestMatrix w(random, format, n, k);
      std::vector<float> weights(static_cast<size_t>(k));
      for (int64_t rows : {1, 2, 3, 5, 8, 17, 33, 70}) {
        RowsBuffer x = RowsBuffer::random(random, rows, k, rows % 3);
        const RowsBuffer out = run(x, w.matrix), exact = run(*exact_, x.view(), w.matrix);
        EXPECT_NE(static_cast<bool>(same_bits(out.view(), exact.view())), rounds(format, k))
            << matrix_format_name(format) << ", K " << k << ", rows " << rows;
        for (int64_t i = 0; i < n; ++i) {
          dequantize_row(w.matrix, i, weights.data());
          for (int64_t t = 0; t < rows; ++t) {
            const std::vector<double> lost_columns = lost(format, x.read().row(t), k);
            double sum = 0, magnitude = 0, rounding = 0;
            for (int64_t c = 0; c < k; ++c) {
              const double weight = weights[static_cast<size_t>(c)];
              sum += x.read().row(t)[c] * weight;
              magnitude += std::fabs(x.read().row(t)[c] * weight);
              rounding += std::fabs(weight) * lost_columns[static_cast<size_t>(c)];
            }
            // As in linear_test.cc, and three more of scales and their product.
            const double roundings = 2.0 * static_cast<double>(k) / 16 + 13;
            judge.check(out.read().row(t)[i], sum, rounding + roundings * kEpsilon * (magnitude + rounding),
                        "n " + std::to_string(i) + ", row " + std::to_string(t) + " of " +
                            std::to_string(rows) + ", K " + std::to_string(k));
          }
        }
      }
    }
  }
}

// One weight of 1 at a time shows what is left of each column: rounded to the nearest, whatever the magnitude
// of the row or of the other columns.
TEST_P(Int8Activations, ColumnsAreRoundedToTheNearest) {
  Random random(82);
  constexpr int64_t kColumns = 160;
  TestMatrix tiles(random, MatrixFormat::kMxfp4, kColumns, kColumns),
      bf16(random, MatrixFormat::kBF16, kColumns, kColumns);
  std::fill(tiles.scales.begin(), tiles.scales.end(), 127);
  std::fill(tiles.codes.begin(), tiles.codes.end(), 0);
  std::fill(bf16.codes.begin(), bf16.codes.end(), 0);
  for (int64_t i = 0; i < kColumns; ++i) {
    tiles.codes[static_cast<size_t>((i * kColumns + i) / 2)] = i % 2 == 0 ? 0x02 : 0x20;
    const uint16_t one = float_to_bf16(1.0f);
    std::memcpy(&bf16.codes[static_cast<size_t>(i * kColumns + i) * 2], &one, 2);
  }
  for (int exponent = -120; exponent < 127; exponent += 3) {
    RowsBuffer x(1, kColumns);
    for (int64_t i = 0; i < kColumns; ++i) {
      // Blocks of 32 of quite different magnitudes.
      const int smaller = static_cast<int>(random.below(8)) + static_cast<int>(i / 32 % 3) * 30;
      x.view().row(0)[i] = std::clamp(std::ldexp(random.normal(), exponent - smaller), -0x1p126f, 0x1p126f);
    }
    x.view().row(0)[5] = 0;
    const RowsBuffer found = run(x, tiles.matrix), pairs = run(x, bf16.matrix);
    const std::vector<double> lost_columns = lost(MatrixFormat::kMxfp4, x.read().row(0), kColumns);
    for (int64_t i = 0; i < kColumns; ++i) {
      const float wanted = x.read().row(0)[i];
      ASSERT_LE(std::fabs(static_cast<double>(found.read().row(0)[i]) - wanted),
                lost_columns[static_cast<size_t>(i)] * (1 + 0x1p-14) + 0x1p-149)
          << "2^" << exponent << ", column " << i;
      if (std::fabs(wanted) < 0x1p-126f) continue;
      const bool rounded = rounds(MatrixFormat::kBF16, kColumns);
      ASSERT_EQ(pairs.read().row(0)[i], rounded ? bf16_to_float(float_to_bf16(wanted)) : wanted)
          << "2^" << exponent << ", column " << i;
    }
  }
}

TEST_P(Int8Activations, ARowAloneIsTheRowAmongOthers) {
  Random random(83);
  using enum MatrixFormat;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kBF16, kGgufNvfp4}) {
    for (int64_t k : {2100, 1041}) expect_rows_alone(*ops_, random, format, columns_for(format, k));
  }
}

TEST_P(Int8Activations, ThreadsAndNeighboursChangeNoBit) {
  Random random(84);
  using enum MatrixFormat;
  const std::vector<MatrixFormat> formats = {kBF16, kNvfp4, kF32, kMxfp4, kBF16, kQ4};
  for (int64_t rows : {1, 5, 40}) {
    constexpr int64_t kColumns = 288;
    const RowsBuffer x = RowsBuffer::random(random, rows, kColumns, 5);
    std::vector<TestMatrix> own;
    std::vector<RowsBuffer> alone;
    own.reserve(formats.size());
    for (MatrixFormat format : formats) {
      own.emplace_back(random, format, 515, kColumns, 1.5f);
      alone.push_back(run(x, own.back().matrix));
    }
    for (int threads : {1, 2, 3, 7}) {
      const std::unique_ptr<OnHostData> ops = make_ops(GetParam(), threads);
      std::vector<RowsBuffer> outs;
      std::vector<OnHostData::HostProduct> products;
      outs.reserve(formats.size());
      for (const TestMatrix& w : own) {
        outs.emplace_back(rows, w.matrix.n);
        products.push_back({w.matrix, nullptr, outs.back().view()});
      }
      ops->linears(x.view(), products);
      for (size_t i = 0; i < outs.size(); ++i)
        EXPECT_TRUE(same_bits(outs[i].read(), alone[i].read())) << i << ", " << threads << " threads";
    }
  }
}

TEST_P(Int8Activations, WhatIsNoNumberStaysSoAndDisturbsNoOtherRow) {
  Random random(85);
  using enum MatrixFormat;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kBF16}) {
    TestMatrix w(random, format, 40, 288);
    for (float bad : {kNaN, INFINITY, -INFINITY}) {
      RowsBuffer x = RowsBuffer::random(random, 9, 288);
      const RowsBuffer wanted = run(x, w.matrix);
      x.view().row(4)[200] = bad;
      const RowsBuffer out = run(x, w.matrix);
      for (int64_t r = 0; r < 9; ++r) {
        for (int64_t n = 0; n < 40; ++n) {
          if (r == 4) {
            EXPECT_FALSE(std::isfinite(out.view().row(r)[n])) << matrix_format_name(format) << ", " << n;
          } else {
            EXPECT_EQ(out.view().row(r)[n], wanted.view().row(r)[n]);
          }
        }
      }
    }
  }
}

// What is printed at start: found by products that are exact to the bit on one side.
TEST_P(Int8Activations, ErrorsAreMeasuredAgainstExactProducts) {
  Random random(86);
  EXPECT_TRUE(ops_->ops().rounds_activations());
  EXPECT_FALSE(exact_->ops().rounds_activations());
  using enum MatrixFormat;
  std::vector<TestMatrix> own;
  std::vector<Matrix> placed, placed_exact;
  own.reserve(4);
  for (MatrixFormat format : {kNvfp4, kBF16, kF32, kNvfp4}) {
    const Matrix& w = own.emplace_back(random, format, 300, 1024).matrix;
    placed.push_back(ops_->ops().place(w).value());
    placed_exact.push_back(exact_->ops().place(w).value());
    const RowsBuffer x = RowsBuffer::random(random, 9, 1024);
    RowsBuffer out(9, 300);
    ops_->ops().exact_linear(x.view(), placed.back(), out.view());
    EXPECT_TRUE(same_bits(out.read(), run(*exact_, x.view(), w).view())) << matrix_format_name(format);
  }
  EXPECT_TRUE(measure_rounding(exact_->ops(), placed_exact).empty());
  const std::vector<RoundingError> errors = measure_rounding(ops_->ops(), placed);
  ASSERT_EQ(errors.size(), rounds(kBF16, 1024) ? 2u : 1u);
  EXPECT_EQ(errors[0].format, kNvfp4);
  // A normal column is off by a uniform share of 1/127 of the largest of 32, about 2.1 of it.
  EXPECT_NEAR(errors[0].rms, 2.1 / 127 / std::sqrt(12.0), 0.001);
  EXPECT_GT(errors[0].worst, 3 * errors[0].rms);
  EXPECT_LT(errors[0].worst, 6 * errors[0].rms);
  if (errors.size() < 2) return;
  EXPECT_EQ(errors[1].format, kBF16);
  EXPECT_LT(errors[1].rms, 0x1p-8);
  EXPECT_GT(errors[1].rms, 0x1p-11);
}

INSTANTIATE_TEST_SUITE_P(All, Int8Activations, ::testing::ValuesIn(int8_backends()), case_name);

TEST(Int8ActivationsOption, IsOfTheCpuAlone) {
  for (const char* device : {"reference", "cuda"}) {
    BackendOptions options;
    options.cpu_activations = "int8";
    const Result<std::unique_ptr<Ops>> ops = make_backend(device, options);
    ASSERT_FALSE(ops.ok());
    EXPECT_EQ(ops.status().code(), ErrorCode::kUser);
    EXPECT_NE(ops.status().message().find(device), std::string::npos) << ops.status().message();
  }
  BackendOptions options;
  options.cpu_activations = "int7";
  const Result<std::unique_ptr<Ops>> ops = make_backend("cpu", options);
  ASSERT_FALSE(ops.ok());
  EXPECT_NE(ops.status().message().find("int7"), std::string::npos) << ops.status().message();
}

}  // namespace
}  // namespace nibble::testing
