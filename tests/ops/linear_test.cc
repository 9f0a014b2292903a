#include <tuple>

#include "ops/backends.h"
#include "ops/cpu/weight_tiles.h"

namespace nibble::testing {
namespace {

class Linear : public OnEveryBackend {
 protected:
  RowsBuffer run(const RowsBuffer& x, const Matrix& w, int64_t gap = 0) { return run(*ops_, x, w, gap); }
  static RowsBuffer run(OnHostData& ops, const RowsBuffer& x, const Matrix& w, int64_t gap = 0) {
    RowsBuffer out(x.view().rows, w.n, gap);
    ops.linear(x.view(), w, out.view());
    return out;
  }
  // Unit roundoffs of an activation: as the sum of two bfloat16 numbers it loses at most 2^-17 of itself.
  static double of_activations() { return GetParam().tensor_cores() ? 0x1p-17 / kEpsilon : 0; }
  // What the cpu takes from each activation at most, by 4-bit weights that it holds in tiles: 2^-22 of the
  // largest of its 128 columns.
  static std::vector<double> lost_in_fixed_point(MatrixFormat format, const float* x, int64_t k) {
    std::vector<double> lost(static_cast<size_t>(k));
    if (GetParam().name != "cpu" || !cpu::tile_format(format)) return lost;
    for (int64_t begin = 0; begin < k; begin += 128) {
      double largest = 0;
      for (int64_t i = begin; i < std::min(k, begin + 128); ++i)
        largest = std::max(largest, std::fabs(static_cast<double>(x[i])));
      for (int64_t i = begin; i < std::min(k, begin + 128); ++i)
        lost[static_cast<size_t>(i)] = largest * 0x1p-22;
    }
    return lost;
  }
};

TEST_P(Linear, AgreesWithTheFormula) {
  Random random(1);
  struct Shape {
    int64_t n, k;
  };
  const Shape shapes[] = {
      {1, 16},   {7, 17},    {130, 63}, {7, 384},    {130, 400}, {33, 1000}, {5, 1008},
      {3, 1024}, {18, 1040}, {9, 2064}, {130, 1152}, {4, 1},     {19, 2272}, {131, 256},
      {5, 1280}, {17, 32},   {48, 160}, {7, 4096},   {3, 5003},  {2, 8192}};  // the last are wide rows to
                                                                              // cuda
  for (MatrixFormat format : kFormats) {
    Judge judge("linear_" + std::string(matrix_format_name(format)));
    for (const Shape& shape : shapes) {
      if (shape.k % matrix_format_info(format).group != 0) continue;
      TestMatrix w(random, format, shape.n, shape.k, 0.37f);
      std::vector<float> weights(static_cast<size_t>(shape.k));
      for (int64_t rows : {1, 2, 3, 5, 8, 17, 33, 70}) {
        const int64_t gap = rows % 3;
        RowsBuffer x = RowsBuffer::random(random, rows, shape.k, gap);
        RowsBuffer out = run(x, w.matrix, gap);
        EXPECT_TRUE(out.gaps_untouched());
        for (int64_t n = 0; n < shape.n; ++n) {
          Matrix unscaled = w.matrix;
          unscaled.tensor_scale = 1.0f;
          dequantize_row(unscaled, n, weights.data());
          for (int64_t t = 0; t < rows; ++t) {
            double sum = 0, magnitude = 0, fixed_point = 0;
            const std::vector<double> lost = lost_in_fixed_point(format, x.read().row(t), shape.k);
            for (int64_t i = 0; i < shape.k; ++i) {
              fixed_point += lost[static_cast<size_t>(i)] * std::fabs(weights[static_cast<size_t>(i)]);
              double product = static_cast<double>(x.read().row(t)[i]) * weights[static_cast<size_t>(i)];
              sum += product;
              magnitude += std::fabs(product);
            }
            // K/16 roundings in a lane (twice that without FMA), 4 in the tree, tensor scale, and the
            // reference's scaled weight.
            double roundings = 2.0 * static_cast<double>(shape.k) / 16 + 10 + of_activations();
            judge.check(out.view().row(t)[n], sum * w.matrix.tensor_scale,
                        (roundings * kEpsilon * magnitude + fixed_point) * w.matrix.tensor_scale,
                        "n " + std::to_string(n) + ", row " + std::to_string(t) + " of " +
                            std::to_string(rows) + ", K " + std::to_string(shape.k));
          }
        }
      }
    }
  }
}

// The fused operation is the others one after the other, to the bit.
TEST_P(Linear, SeveralMatricesAtOnce) {
  Random random(11);
  using enum MatrixFormat;
  for (int64_t rows : {1, 4, 5, 9, 17, 40, 150}) {
    for (int64_t k : {96, 512, 2080}) {
      const std::vector<MatrixFormat> formats = {kBF16, kNvfp4, kBF16, kF32,  kBF16, kMxfp4,
                                                 kBF16, kBF16,  kBF16, kBF16, kBF16, kBF16};
      const RowsBuffer x = RowsBuffer::random(random, rows, k, 4);
      std::vector<TestMatrix> own;
      std::vector<std::vector<float>> biases;
      std::vector<RowsBuffer> outs;
      std::vector<OnHostData::HostProduct> products;
      own.reserve(formats.size()), biases.reserve(formats.size()), outs.reserve(formats.size());
      for (size_t i = 0; i < formats.size(); ++i) {
        const int64_t n = 1 + random.below(100);
        own.emplace_back(random, formats[i], n, k, 0.1f);
        biases.push_back(random.floats(n));
        outs.emplace_back(rows, n, i % 3);
        products.push_back(
            {own.back().matrix, i % 2 == 0 ? biases.back().data() : nullptr, outs.back().view()});
      }
      ops_->linears(x.view(), products);
      for (size_t i = 0; i < formats.size(); ++i) {
        RowsBuffer alone = run(x, own[i].matrix);
        if (i % 2 == 0) ops_->add_bias(alone.view(), biases[i].data());
        EXPECT_TRUE(same_bits(outs[i].read(), alone.read())) << i << ", rows " << rows << ", K " << k;
        EXPECT_TRUE(outs[i].gaps_untouched());
      }
    }
  }
}

// Heads side by side in wider rows: what lies between them is neither read nor written.
TEST_P(Linear, HeadsAgreeWithTheFormula) {
  Random random(10);
  for (MatrixFormat format : {MatrixFormat::kF32, MatrixFormat::kBF16, MatrixFormat::kNvfp4}) {
    Judge judge("linear_heads_" + std::string(matrix_format_name(format)));
    for (auto [heads, n, k] : {std::tuple<int64_t, int64_t, int64_t>{1, 5, 16}, {3, 33, 48}, {4, 128, 272}}) {
      const int64_t x_head = k + 3, out_head = n + 2;
      std::vector<TestMatrix> own;
      std::vector<Matrix> w_H;
      own.reserve(static_cast<size_t>(heads));
      for (int64_t h = 0; h < heads; ++h) w_H.push_back(own.emplace_back(random, format, n, k, 0.5f).matrix);
      for (int64_t rows : {1, 2, 9, 33}) {
        RowsBuffer x(rows, heads * x_head, 1), out(rows, heads * out_head, 2), alone(1, heads * out_head);
        for (int64_t t = 0; t < rows; ++t) {
          for (int64_t i = 0; i < heads * x_head; ++i)
            if (i % x_head < k) x.view().row(t)[i] = random.normal();
        }
        ops_->linear_heads(x.read(), x_head, w_H, out.view(), out_head);
        EXPECT_TRUE(out.gaps_untouched());
        std::vector<float> weights(static_cast<size_t>(k));
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t i = 0; i < out_head; ++i) {
            if (i < n) dequantize_row(w_H[static_cast<size_t>(h)], i, weights.data());
            for (int64_t t = 0; t < rows; ++t) {
              const float found = out.view().row(t)[h * out_head + i];
              if (i >= n) {
                EXPECT_TRUE(std::isnan(found));
                continue;
              }
              double sum = 0, magnitude = 0;
              for (int64_t c = 0; c < k; ++c) {
                const double product =
                    static_cast<double>(x.view().row(t)[h * x_head + c]) * weights[static_cast<size_t>(c)];
                sum += product, magnitude += std::fabs(product);
              }
              judge.check(found, sum,
                          (2.0 * static_cast<double>(k) / 16 + 10 + of_activations()) * kEpsilon * magnitude,
                          "head " + std::to_string(h) + ", K " + std::to_string(k));
            }
          }
        }
        for (int64_t t = 0; t < rows; ++t) {
          ops_->linear_heads(x.read().slice(t, 1), x_head, w_H, alone.view(), out_head);
          EXPECT_TRUE(same_bits(alone.read(), out.read().slice(t, 1)));
        }
      }
    }
  }
}

// Every nibble with every scale code (of f16: every 257th), picked out by a one-hot row at every place of a
// 128-column chunk.
TEST_P(Linear, AllNibblesAreExact) {
  Random random(2);
  constexpr int64_t kColumns = 256;
  for (MatrixFormat format : {MatrixFormat::kNvfp4, MatrixFormat::kMxfp4, MatrixFormat::kQ4}) {
    // Row n has the block scale n everywhere; column c has the code (c + c / 16) % 16.
    TestMatrix w(random, format, 256, kColumns);
    auto code = [](int64_t column) { return static_cast<uint8_t>((column + column / 16) % 16); };
    for (int64_t c = 0; c < 256 * kColumns; c += 2)
      w.codes[static_cast<size_t>(c / 2)] =
          static_cast<uint8_t>(code(c % kColumns) | (code(c % kColumns + 1) << 4));
    // Both bytes of an f16 scale, one byte of others; those that are not finite become 0.
    const size_t row_bytes = w.scales.size() / 256;
    for (size_t i = 0; i < w.scales.size(); ++i) {
      const auto n = static_cast<uint8_t>(i / row_bytes);
      const bool bad = format == MatrixFormat::kNvfp4   ? e4m3_is_nan(n)
                       : format == MatrixFormat::kMxfp4 ? n > 0xFC  // 6 times more is infinite
                                                        : (n & 0x7C) == 0x7C;
      w.scales[i] = bad ? 0 : n;
    }
    std::vector<std::vector<float>> wanted(256, std::vector<float>(kColumns));
    for (int64_t n = 0; n < 256; ++n) dequantize_row(w.matrix, n, wanted[static_cast<size_t>(n)].data());
    for (int64_t rows_at_once : {1, 256}) {
      for (int64_t first = 0; first < kColumns; first += rows_at_once) {
        RowsBuffer x(rows_at_once, kColumns);
        for (int64_t r = 0; r < rows_at_once; ++r) {
          std::fill_n(x.view().row(r), kColumns, 0.0f);
          x.view().row(r)[first + r] = 1.0f;
        }
        RowsBuffer out = run(x, w.matrix);
        for (int64_t r = 0; r < rows_at_once; ++r) {
          for (int64_t n = 0; n < 256; ++n) {
            ASSERT_EQ(out.view().row(r)[n], wanted[static_cast<size_t>(n)][static_cast<size_t>(first + r)])
                << matrix_format_name(format) << ", column " << first + r << ", scale code " << n;
          }
        }
      }
    }
  }
}

// All e4m3 codes but NaN, at each lane.
TEST_P(Linear, AllFp8CodesAreExact) {
  Random random(9);
  for (MatrixFormat format : {MatrixFormat::kF8E4M3, MatrixFormat::kFp8Block}) {
    TestMatrix w(random, format, 256, 256);
    for (size_t i = 0; i < w.codes.size(); ++i) {
      const auto code = static_cast<uint8_t>(i / 256 + i % 256);
      w.codes[i] = e4m3_is_nan(code) ? 0 : code;
    }
    std::vector<float> wanted(256);
    for (int64_t column = 0; column < 256; column += 5) {
      RowsBuffer x(1, 256);
      std::fill_n(x.view().row(0), 256, 0.0f);
      x.view().row(0)[column] = 1.0f;
      RowsBuffer out = run(x, w.matrix);
      for (int64_t n = 0; n < 256; ++n) {
        dequantize_row(w.matrix, n, wanted.data());
        ASSERT_EQ(out.view().row(0)[n], wanted[static_cast<size_t>(column)]) << "n " << n << ", " << column;
      }
    }
  }
}

// All 16-bit patterns but NaN and infinity, by a one-hot row.
TEST_P(Linear, AllHalfCodesAreExact) {
  Random random(3);
  for (MatrixFormat format : {MatrixFormat::kF16, MatrixFormat::kBF16}) {
    TestMatrix w(random, format, 1 << 12, 16);
    std::vector<float> row(16);
    for (uint32_t code = 0; code < 1 << 16; ++code) {
      auto bits = static_cast<uint16_t>(code);
      float value = format == MatrixFormat::kF16 ? f16_to_float(bits) : bf16_to_float(bits);
      if (!std::isfinite(value)) bits = 0;
      std::memcpy(w.codes.data() + code * 2, &bits, 2);
    }
    for (int64_t column = 0; column < 16; ++column) {
      RowsBuffer x(1, 16);
      std::fill_n(x.view().row(0), 16, 0.0f);
      x.view().row(0)[column] = 1.0f;
      RowsBuffer out = run(x, w.matrix);
      for (int64_t n = 0; n < 1 << 12; ++n) {
        dequantize_row(w.matrix, n, row.data());
        ASSERT_EQ(out.view().row(0)[n], row[static_cast<size_t>(column)])
            << "n " << n << ", column " << column;
      }
    }
  }
}

TEST_P(Linear, ARowAloneIsTheRowAmongOthers) {
  Random random(4);
  for (MatrixFormat format : kFormats) {
    for (int64_t k : {2064, 1041}) expect_rows_alone(*ops_, random, format, columns_for(format, k));
  }
}

// Prompts: where kernels for many rows take over, and where their tiles of rows and of weights end. The
// second shape is wide enough that every multiprocessor of a GPU has whole tiles to do.
TEST_P(Linear, ARowOfAPromptIsTheRowAlone) {
  Random random(12);
  struct Shape {
    int64_t n, k;
    std::vector<int64_t> rows;
  };
  const Shape shapes[] = {{150, 1168, {1, 31, 32, 33, 63, 64, 65, 127, 129, 200, 300}},
                          {5700, 336, {129, 300}}};
  for (MatrixFormat format :
       {MatrixFormat::kBF16, MatrixFormat::kNvfp4, MatrixFormat::kMxfp4, MatrixFormat::kQ4}) {
    for (const Shape& shape : shapes) {
      const int64_t k = columns_for(format, shape.k);
      TestMatrix w(random, format, shape.n, k, 0.5f);
      RowsBuffer x = RowsBuffer::random(random, 300, k, 4);
      for (int64_t rows : shape.rows) {
        RowsBuffer out(rows, shape.n, 1), alone(1, shape.n);
        ops_->linear(x.read().slice(300 - rows, rows), w.matrix, out.view());
        EXPECT_TRUE(out.gaps_untouched());
        for (int64_t t : {int64_t{0}, rows / 3, rows / 2, rows - 2, rows - 1}) {
          if (t < 0) continue;
          ops_->linear(x.read().slice(300 - rows + t, 1), w.matrix, alone.view());
          EXPECT_TRUE(same_bits(out.read().slice(t, 1), alone.read()))
              << matrix_format_name(format) << ", N " << shape.n << ", K " << k << ", row " << t << " of "
              << rows;
        }
      }
    }
  }
}

TEST_P(Linear, ThreadsAndStridesChangeNoBit) {
  Random random(5);
  for (MatrixFormat format : kFormats) {
    const int64_t k = columns_for(format, 272);
    TestMatrix w(random, format, 515, k, 1.5f);
    for (int64_t rows : {1, 5, 40}) {
      RowsBuffer x = RowsBuffer::random(random, rows, k);
      RowsBuffer wanted = run(x, w.matrix);
      for (int threads : {1, 2, 3, 7}) {
        std::unique_ptr<OnHostData> ops = make_ops(GetParam(), threads);
        EXPECT_TRUE(same_bits(run(*ops, x, w.matrix).view(), wanted.view())) << threads << " threads";
      }
      EXPECT_TRUE(same_bits(run(x.with_gap(3), w.matrix, 5).view(), wanted.view()));
    }
  }
}

// Bytes of a row, in its own place and length, decide; not what lies behind it (sanitizers watch the reads).
TEST_P(Linear, WeightRowsDoNotLeakIntoEachOther) {
  Random random(6);
  for (MatrixFormat format : kFormats) {
    const int64_t k = columns_for(format, 48);
    const MatrixFormatInfo& info = matrix_format_info(format);
    TestMatrix w(random, format, 9, k);
    RowsBuffer x = RowsBuffer::random(random, 2, k);
    RowsBuffer all = run(x, w.matrix);
    for (int64_t n = 0; n < 9; ++n) {
      Matrix one = w.matrix;
      one.n = 1;
      // Bytes of its own, exactly as many as it has.
      const uint8_t* row = w.codes.data() + n * info.code_row_bytes(k);
      const std::vector<uint8_t> codes(row, row + info.code_row_bytes(k));
      one.codes = codes.data();
      const uint8_t* row_scales = w.scales.data() + n / info.scale_rows * info.scale_row_bytes(k);
      const std::vector<uint8_t> scales(row_scales, row_scales + info.scale_row_bytes(k));
      if (one.scales != nullptr) one.scales = scales.data();
      RowsBuffer out = run(x, one);
      for (int64_t t = 0; t < 2; ++t) EXPECT_TRUE(same_bits(out.view().row(t), all.view().row(t) + n, 1));
    }
  }
}

TEST_P(Linear, NoRowsIsNoWork) {
  Random random(7);
  TestMatrix w(random, MatrixFormat::kBF16, 5, 32);
  RowsBuffer x(0, 32), out(0, 5);
  ops_->linear(x.view(), w.matrix, out.view());
}

TEST_P(Linear, DenormalActivationsCount) {
  Random random(8);
  TestMatrix w(random, MatrixFormat::kF32, 3, 20);
  RowsBuffer x(1, 20);
  std::fill_n(x.view().row(0), 20, 0.0f);
  x.view().row(0)[17] = 0x1p-140f;
  RowsBuffer out = run(x, w.matrix);
  std::vector<float> row(20);
  for (int64_t n = 0; n < 3; ++n) {
    dequantize_row(w.matrix, n, row.data());
    EXPECT_EQ(out.view().row(0)[n], row[17] * 0x1p-140f);
  }
}

INSTANTIATE_ON_ALL_BACKENDS(Linear);

}  // namespace
// Backends that hold BF16 weights in 12 bits where almost all of a piece of the matrix have neighbouring
// exponents: with rows behind them whose exponents are anything, the same weights stay as they are.
TEST_P(Linear, BF16In12BitsIsBF16) {
  Random random(21);
  for (int64_t k : {16, 64, 100, 1040, 3072}) {
    for (int64_t n : {1, 31, 33, 160}) {
      TestMatrix plain(random, MatrixFormat::kBF16, n + 64, k, 0.37f);
      auto* codes = reinterpret_cast<uint16_t*>(plain.codes.data());
      // Here and there the weights that are far from the others: zeros, tiny and large ones.
      const uint16_t kFar[] = {0, 0x8000, 1, 0x8003, 0x0080, 0x9234, 0x4A31, 0xC8FF, 0x2B00};
      for (int64_t i = random.below(300); i < n * k; i += 1 + random.below(2000))
        codes[i] = kFar[random.below(std::ssize(kFar))];
      for (int64_t i = n * k; i < (n + 64) * k; ++i) {
        codes[i] = static_cast<uint16_t>(random.below(0x7F80));
      }
      Matrix packed = plain.matrix;
      packed.n = n;
      EXPECT_EQ(ops_->ops().place(packed).value().in_12_bits, GetParam().tensor_cores()) << k << " " << n;
      EXPECT_FALSE(ops_->ops().place(plain.matrix).value().in_12_bits) << k << " " << n;
      for (int64_t rows : {1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 130}) {
        const RowsBuffer x = RowsBuffer::random(random, rows, k);
        const RowsBuffer wanted = run(x, plain.matrix), found = run(x, packed);
        for (int64_t t = 0; t < rows; ++t) {
          EXPECT_TRUE(same_bits(found.read().row(t), wanted.read().row(t), n))
              << "K " << k << ", N " << n << ", row " << t << " of " << rows;
        }
      }
    }
  }
}

}  // namespace nibble::testing
