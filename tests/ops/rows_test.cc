// The operations on rows: norm, rotary, gates, activation, addition, embedding, cache writes.
#include "ops/backends.h"

namespace nibble::testing {
namespace {

constexpr int64_t kRowCounts[] = {1, 2, 3, 5, 8, 17, 33};
constexpr int64_t kWidths[] = {1, 15, 16, 17, 63, 384, 1001};

class RowOps : public OnEveryBackend {};

TEST_P(RowOps, RmsNorm) {
  Judge judge("rms_norm");
  Random random(31);
  for (int64_t rows : kRowCounts) {
    for (int64_t cols : kWidths) {
      RowsBuffer x = RowsBuffer::random(random, rows, cols, 2), out(rows, cols, 3);
      std::vector<float> weight = random.floats(cols);
      ops_->rms_norm(x.view(), weight.data(), 1e-6f, out.view());
      EXPECT_TRUE(out.gaps_untouched());
      for (int64_t t = 0; t < rows; ++t) {
        double sum = 0;
        for (int64_t i = 0; i < cols; ++i) sum += std::pow(static_cast<double>(x.view().row(t)[i]), 2);
        double scale = 1 / std::sqrt(sum / static_cast<double>(cols) + 1e-6f);
        for (int64_t i = 0; i < cols; ++i) {
          double wanted = x.view().row(t)[i] * scale * weight[static_cast<size_t>(i)];
          judge.check(out.view().row(t)[i], wanted,
                      (static_cast<double>(cols) / 16 + 10) * kEpsilon * std::fabs(wanted),
                      std::to_string(cols) + " columns");
        }
        RowsBuffer alone(1, cols);
        ops_->rms_norm(x.read().slice(t, 1), weight.data(), 1e-6f, alone.view());
        EXPECT_TRUE(same_bits(alone.view(), out.view().slice(t, 1)));
      }
      ops_->rms_norm(x.view(), weight.data(), 1e-6f, x.view());  // in place
      EXPECT_TRUE(same_bits(x.view(), out.view()));
    }
  }
}

TEST_P(RowOps, Rope) {
  Judge judge("rope");
  Random random(32);
  for (int64_t rows : kRowCounts) {
    for (auto [dim, rotary] :
         {std::pair<int64_t, int64_t>{64, 64}, {64, 32}, {96, 72}, {20, 6}, {128, 128}}) {
      const int64_t heads = 3, half = rotary / 2;
      std::vector<float> inv_freq(static_cast<size_t>(half));
      for (int64_t i = 0; i < half; ++i) {
        inv_freq[static_cast<size_t>(i)] =
            std::pow(10000.0f, -static_cast<float>(i) / static_cast<float>(half));
      }
      std::vector<int32_t> positions;
      for (int64_t t = 0; t < rows; ++t) positions.push_back(static_cast<int32_t>(random.below(100000)));
      RowsBuffer table(rows, rotary, 1), x = RowsBuffer::random(random, rows, heads * dim, 5);
      RowsBuffer before = x.with_gap(0);
      ops_->rope_table(positions.data(), inv_freq, 1.25f, table.view());
      ops_->rope(x.view(), dim, table.view());
      EXPECT_TRUE(x.gaps_untouched());
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          const float* in = before.view().row(t) + h * dim;
          const float* out = x.view().row(t) + h * dim;
          for (int64_t i = 0; i < half; ++i) {
            double angle =
                static_cast<float>(positions[static_cast<size_t>(t)]) * inv_freq[static_cast<size_t>(i)];
            double c = std::cos(angle) * 1.25, s = std::sin(angle) * 1.25, a = in[i], b = in[half + i];
            double tolerance = 4 * kEpsilon * 1.25 * (std::fabs(a) + std::fabs(b));
            judge.check(out[i], a * c - b * s, tolerance, "first half");
            judge.check(out[half + i], b * c + a * s, tolerance, "second half");
          }
          EXPECT_TRUE(same_bits(in + rotary, out + rotary, dim - rotary));
        }
      }
      RowsBuffer alone = before.with_gap(0);
      for (int64_t t = 0; t < rows; ++t) ops_->rope(alone.view().slice(t, 1), dim, table.read().slice(t, 1));
      EXPECT_TRUE(same_bits(alone.view(), x.view()));
    }
  }
}

// Values of interest for exp and its relatives, with random ones between.
std::vector<float> extremes(Random& random, int64_t n) {
  std::vector<float> values = {0.0f,    -0.0f,  1.0f,   -1.0f,  20.0f,   -20.0f,  20.00001f,
                               88.0f,   -88.0f, 89.5f,  -89.5f, 100.0f,  -100.0f, 104.0f,
                               -104.0f, 1e30f,  -1e30f, 1e-30f, -1e-30f, 1e-42f,  -1e-42f};
  while (static_cast<int64_t>(values.size()) < n) values.push_back(random.normal() * 30);
  return values;
}

TEST_P(RowOps, Activate) {
  Judge judge("silu");
  Random random(33);
  for (int64_t cols : {25, 63, 1001}) {
    std::vector<float> gate = extremes(random, cols), up = random.floats(cols), out(gate.size(), kNaN);
    Rows<float> gate_row(gate.data(), 1, cols), up_row(up.data(), 1, cols);
    ops_->activate(Activation::kSilu, gate_row, up_row, {out.data(), 1, cols});
    for (size_t i = 0; i < gate.size(); ++i) {
      // Where exp(-g) overflows, the product that is left is below 90 * 2^-128.
      double g = gate[i], wanted = g / (1 + std::exp(-g)) * up[i];
      judge.check(out[i], wanted, 8 * kEpsilon * std::fabs(wanted) + 0x1p-120 * std::fabs(up[i]),
                  "gate " + std::to_string(g));
      float alone = kNaN;
      ops_->activate(Activation::kSilu, {gate.data() + i, 1, 1}, {up.data() + i, 1, 1}, {&alone, 1, 1});
      EXPECT_TRUE(same_bits(&alone, &out[i], 1)) << "place " << i;
    }
    ops_->activate(Activation::kSilu, gate_row, up_row, gate_row);  // in place
    EXPECT_TRUE(same_bits(gate.data(), out.data(), cols));
  }
}

TEST_P(RowOps, GateOutputByElementAndByHead) {
  Judge judge("softplus");
  Random random(34);
  for (int64_t heads : {1, 3, 17, 300}) {
    for (int64_t dim : {1, 16, 33}) {
      const int64_t cols = heads * dim;
      for (OutputGate kind : {OutputGate::kSoftplusElement, OutputGate::kSoftplusHead}) {
        const int64_t gates = kind == OutputGate::kSoftplusElement ? cols : heads;
        RowsBuffer gate(2, gates, 1), x = RowsBuffer::random(random, 2, cols, 2), before = x.with_gap(0);
        for (int64_t t = 0; t < 2; ++t) {
          std::vector<float> values = extremes(random, gates);
          std::shuffle(values.begin(), values.end(), random.engine());
          std::copy_n(values.begin(), gates, gate.view().row(t));
        }
        ops_->gate_output(kind, gate.view(), dim, x.view());
        EXPECT_TRUE(x.gaps_untouched());
        for (int64_t t = 0; t < 2; ++t) {
          for (int64_t i = 0; i < cols; ++i) {
            double g = gate.view().row(t)[kind == OutputGate::kSoftplusElement ? i : i / dim];
            double wanted =
                before.view().row(t)[i] * (std::max(g, 0.0) + std::log1p(std::exp(-std::fabs(g))));
            judge.check(x.view().row(t)[i], wanted, 10 * kEpsilon * std::fabs(wanted) + 0x1p-126,
                        "gate " + std::to_string(g));
          }
        }
      }
    }
  }
}

TEST_P(RowOps, SoftplusOfInfinitiesAndNaN) {
  float gates[3] = {INFINITY, -INFINITY, kNaN}, x[3] = {2, 2, 2};
  ops_->gate_output(OutputGate::kSoftplusElement, {gates, 1, 3}, 1, {x, 1, 3});
  EXPECT_EQ(x[0], INFINITY);
  EXPECT_EQ(x[1], 0.0f);
  EXPECT_TRUE(std::isnan(x[2]));
}

TEST_P(RowOps, Add) {
  Random random(35);
  for (int64_t rows : kRowCounts) {
    for (int64_t cols : kWidths) {
      RowsBuffer x = RowsBuffer::random(random, rows, cols, 1), y = RowsBuffer::random(random, rows, cols, 2);
      RowsBuffer before = x.with_gap(0);
      ops_->add(y.view(), x.view());
      EXPECT_TRUE(x.gaps_untouched());
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t i = 0; i < cols; ++i) {
          ASSERT_EQ(x.view().row(t)[i], before.view().row(t)[i] + y.view().row(t)[i]);
        }
      }
    }
  }
}

TEST_P(RowOps, Embed) {
  Random random(36);
  for (MatrixFormat format : kFormats) {
    const int64_t k = format == MatrixFormat::kNvfp4 ? 48 : 51;
    TestMatrix table(random, format, 11, k, 0.3f);
    std::vector<int32_t> ids = {10, 0, 3, 3, 7};
    RowsBuffer out(5, k, 4);
    ops_->embed(ids, table.matrix, out.view());
    EXPECT_TRUE(out.gaps_untouched());
    std::vector<float> wanted(static_cast<size_t>(k));
    for (size_t t = 0; t < ids.size(); ++t) {
      dequantize_row(table.matrix, ids[t], wanted.data());
      EXPECT_TRUE(same_bits(out.view().row(static_cast<int64_t>(t)), wanted.data(), k));
    }
  }
}

TEST_P(RowOps, WriteKvPutsEachHeadInItsPage) {
  Random random(37);
  const int64_t heads = 2, dim = 5, page_tokens = 4, table_pages = 3;
  const std::vector<int32_t> table = {4, 1, 0, 2, 5, 3};  // two sequences
  std::vector<float> keys(6 * heads * page_tokens * dim, kNaN), values = keys;
  KvView kv{keys.data(), values.data(), heads, dim, page_tokens, table_pages, table.data()};
  const std::vector<int32_t> positions = {0, 5, 13}, slots = {0, 1, 1};  // 13: around the ring, page 0
  RowsBuffer k = RowsBuffer::random(random, 3, heads * dim, 1),
             v = RowsBuffer::random(random, 3, heads * dim, 2);
  ops_->write_kv(k.view(), v.view(), {3, positions.data(), slots.data()}, kv);
  const std::vector<int64_t> pages = {4, 5, 2}, places = {0, 1, 1};
  for (size_t t = 0; t < 3; ++t) {
    for (int64_t g = 0; g < heads; ++g) {
      const int64_t at = ((pages[t] * heads + g) * page_tokens + places[t]) * dim;
      EXPECT_TRUE(same_bits(keys.data() + at, k.view().row(static_cast<int64_t>(t)) + g * dim, dim));
      EXPECT_TRUE(same_bits(values.data() + at, v.view().row(static_cast<int64_t>(t)) + g * dim, dim));
    }
  }
  EXPECT_EQ(std::count_if(keys.begin(), keys.end(), [](float f) { return !std::isnan(f); }), 3 * heads * dim);
}

INSTANTIATE_ON_ALL_BACKENDS(RowOps);

}  // namespace
}  // namespace nibble::testing
