// The operations on rows: norm, rotary, gates, activation, addition, embedding, cache writes.
#include <tuple>

#include "ops/backends.h"

namespace nibble::testing {
namespace {

constexpr int64_t kRowCounts[] = {1, 2, 3, 5, 8, 17, 33};
constexpr int64_t kWidths[] = {1, 15, 16, 17, 63, 384, 1001};

class RowOps : public OnEveryBackend {};

TEST_P(RowOps, RmsNorm) {
  Judge judge("rms_norm");
  Random random(31);
  std::vector<int64_t> widths(std::begin(kWidths), std::end(kWidths));
  widths.insert(widths.end(), {4096, 9001, 40001});
  for (int64_t rows : kRowCounts) {
    for (int64_t cols : widths) {
      if (rows > 3 && cols > 4096) continue;
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

TEST_P(RowOps, LayerNorm) {
  Judge judge("layer_norm");
  Random random(40);
  for (int64_t rows : kRowCounts) {
    for (int64_t cols : kWidths) {
      RowsBuffer x = RowsBuffer::random(random, rows, cols, 2), out(rows, cols, 3);
      const float shift = 5 * random.normal();
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t i = 0; i < cols; ++i) x.view().row(t)[i] += shift;
      }
      std::vector<float> weight = random.floats(cols), bias = random.floats(cols);
      ops_->layer_norm(x.view(), weight.data(), bias.data(), 1e-6f, out.view());
      EXPECT_TRUE(out.gaps_untouched());
      for (int64_t t = 0; t < rows; ++t) {
        double sum = 0, square = 0, largest = 0;
        for (int64_t i = 0; i < cols; ++i) sum += x.view().row(t)[i];
        const double mean = sum / static_cast<double>(cols);
        for (int64_t i = 0; i < cols; ++i) {
          square += std::pow(x.view().row(t)[i] - mean, 2);
          largest = std::max(largest, std::fabs(double{x.view().row(t)[i]}));
        }
        const double scale = 1 / std::sqrt(square / static_cast<double>(cols) + 1e-6f);
        for (int64_t i = 0; i < cols; ++i) {
          const double normed = (x.view().row(t)[i] - mean) * scale * weight[static_cast<size_t>(i)];
          const double wanted = normed + bias[static_cast<size_t>(i)];
          // The mean is off by a share of the largest value; that shifts all.
          const double roundings = (static_cast<double>(cols) / 16 + 10) * kEpsilon;
          judge.check(out.view().row(t)[i], wanted,
                      roundings * (std::fabs(normed) + std::fabs(wanted) +
                                   largest * scale * std::fabs(weight[static_cast<size_t>(i)])),
                      std::to_string(cols) + " columns");
        }
        RowsBuffer alone(1, cols);
        ops_->layer_norm(x.read().slice(t, 1), weight.data(), bias.data(), 1e-6f, alone.view());
        EXPECT_TRUE(same_bits(alone.view(), out.view().slice(t, 1)));
      }
      ops_->layer_norm(x.view(), weight.data(), bias.data(), 1e-6f, x.view());  // in place
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

// The rotated elements of each head, in the order of halves: interleaved ones and those at an offset are the
// same rotation of the same numbers elsewhere.
TEST_P(RowOps, RopeStylesAndOffsetsMoveNumbersOnly) {
  Random random(39);
  constexpr int64_t kHeads = 3, kRows = 5;
  for (auto [dim, rotary, offset] : {std::tuple<int64_t, int64_t, int64_t>{64, 64, 0},
                                     {64, 32, 0},
                                     {96, 64, 32},
                                     {20, 6, 3},
                                     {40, 40, 0}}) {
    const int64_t half = rotary / 2;
    RowsBuffer table = RowsBuffer::random(random, kRows, rotary, 1);
    RowsBuffer x = RowsBuffer::random(random, kRows, kHeads * dim, 2);
    for (RopeStyle style : {RopeStyle::kHalves, RopeStyle::kInterleaved}) {
      auto place = [&](int64_t i) {  // of element i of the halves
        return offset + (style == RopeStyle::kHalves ? i : i % half * 2 + i / half);
      };
      RowsBuffer halves(kRows, kHeads * rotary);
      for (int64_t t = 0; t < kRows; ++t) {
        for (int64_t i = 0; i < kHeads * rotary; ++i)
          halves.view().row(t)[i] = x.view().row(t)[i / rotary * dim + place(i % rotary)];
      }
      ops_->rope(halves.view(), rotary, table.view());
      RowsBuffer wanted = x.with_gap(2), found = x.with_gap(2);
      for (int64_t t = 0; t < kRows; ++t) {
        for (int64_t i = 0; i < kHeads * rotary; ++i)
          wanted.view().row(t)[i / rotary * dim + place(i % rotary)] = halves.view().row(t)[i];
      }
      ops_->rope(found.view(), dim, table.view(), style, offset);
      EXPECT_TRUE(same_bits(found.read(), wanted.read())) << "dim " << dim << ", offset " << offset;
      EXPECT_TRUE(found.gaps_untouched());
    }
  }
}

TEST_P(RowOps, InterleavedRopeByHand) {
  float x[6] = {9, 1, 2, 3, 4, 9}, table[4] = {0, 0.5f, 1, 2};  // angle 90 degrees; cos 0.5, sin 2
  ops_->rope({x, 1, 6}, 6, {table, 1, 4}, RopeStyle::kInterleaved, 1);
  const float wanted[6] = {9, -2, 1, 3 * 0.5f - 4 * 2, 4 * 0.5f + 3 * 2, 9};
  EXPECT_TRUE(same_bits(x, wanted, 6));
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
  Judge judge("activate");
  Random random(33);
  const ActivationSpec specs[] = {{},
                                  {.kind = ActivationSpec::kSiluClamped, .limit = 10},
                                  {.kind = ActivationSpec::kSiluClamped, .limit = 0.5f},
                                  {.kind = ActivationSpec::kGptOss, .limit = 7},
                                  {.kind = ActivationSpec::kGptOss, .limit = 1, .alpha = 0.5f}};
  for (const ActivationSpec& spec : specs) {
    const bool is_limited = spec.kind != ActivationSpec::kSilu,
               is_gpt_oss = spec.kind == ActivationSpec::kGptOss;
    for (int64_t cols : {25, 63, 1001}) {
      std::vector<float> gate = extremes(random, cols), up = extremes(random, cols), out(gate.size(), kNaN);
      std::shuffle(up.begin(), up.end(), random.engine());
      Rows<float> gate_row(gate.data(), 1, cols), up_row(up.data(), 1, cols);
      ops_->activate(spec, gate_row, up_row, {out.data(), 1, cols});
      for (size_t i = 0; i < gate.size(); ++i) {
        double g = gate[i], u = up[i];
        if (is_limited) {
          g = std::min<double>(g, spec.limit);
          u = std::clamp<double>(u, -spec.limit, spec.limit);
        }
        const double sigmoid = 1 / (1 + std::exp(-g * (is_gpt_oss ? spec.alpha : 1.0f)));
        // u + 1 is rounded before the product, as the models' own code does.
        const double factor = is_gpt_oss ? static_cast<float>(u) + 1.0f : u;
        const double wanted = g * sigmoid * factor;
        // Where exp(-g) overflows, the product that is left is below 90 * 2^-128. The rounding of alpha * g
        // is a relative error of sigmoid.
        const double relative = 8 + (is_gpt_oss ? std::fabs(g * spec.alpha) : 0);
        if (std::fabs(wanted) > 3e38) continue;  // subnormal results are off by a unit of their own
        judge.check(out[i], wanted,
                    relative * kEpsilon * std::fabs(wanted) + 0x1p-120 * std::fabs(factor) + 0x1p-147,
                    "gate " + std::to_string(g) + ", up " + std::to_string(u));
        float alone = kNaN;
        ops_->activate(spec, {gate.data() + i, 1, 1}, {up.data() + i, 1, 1}, {&alone, 1, 1});
        EXPECT_TRUE(same_bits(&alone, &out[i], 1)) << "place " << i;
      }
      ops_->activate(spec, gate_row, up_row, gate_row);  // in place
      EXPECT_TRUE(same_bits(gate.data(), out.data(), cols));
    }
  }
}

TEST_P(RowOps, ActivationsByHand) {
  float gate[2] = {9, -3}, up[2] = {-9, 2}, out[2];
  ops_->activate({.kind = ActivationSpec::kGptOss, .limit = 7}, {gate, 1, 2}, {up, 1, 2}, {out, 1, 2});
  EXPECT_NEAR(out[0], 7 / (1 + std::exp(-1.702 * 7)) * (-7 + 1), 1e-5);
  EXPECT_NEAR(out[1], -3 / (1 + std::exp(1.702 * 3)) * (2 + 1), 1e-7);
  ops_->activate({.kind = ActivationSpec::kSiluClamped, .limit = 7}, {gate, 1, 2}, {up, 1, 2}, {out, 1, 2});
  EXPECT_NEAR(out[0], 7 / (1 + std::exp(-7.0)) * -7, 1e-5);
  EXPECT_NEAR(out[1], -3 / (1 + std::exp(3.0)) * 2, 1e-7);
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

TEST_P(RowOps, AddBias) {
  Random random(38);
  for (int64_t rows : kRowCounts) {
    for (int64_t cols : kWidths) {
      RowsBuffer x = RowsBuffer::random(random, rows, cols, 1), before = x.with_gap(0);
      std::vector<float> bias = random.floats(cols);
      ops_->add_bias(x.view(), bias.data());
      EXPECT_TRUE(x.gaps_untouched());
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t i = 0; i < cols; ++i)
          ASSERT_EQ(x.view().row(t)[i], before.view().row(t)[i] + bias[static_cast<size_t>(i)]);
      }
    }
  }
}

TEST_P(RowOps, CopyAndGather) {
  Random random(45);
  for (int64_t rows : kRowCounts) {
    for (int64_t cols : kWidths) {
      const RowsBuffer x = RowsBuffer::random(random, rows, cols, 1);
      RowsBuffer out(rows, cols, 2);
      ops_->copy(x.read(), out.view());
      EXPECT_TRUE(out.gaps_untouched() && same_bits(x.read(), out.read()));
      std::vector<int32_t> indices;
      for (int64_t i = 0; i < rows + 2; ++i) indices.push_back(static_cast<int32_t>(random.below(rows)));
      RowsBuffer gathered(rows + 2, cols, 3);
      ops_->gather(x.read(), indices, gathered.view());
      EXPECT_TRUE(gathered.gaps_untouched());
      for (int64_t i = 0; i < rows + 2; ++i) {
        EXPECT_TRUE(
            same_bits(x.read().slice(indices[static_cast<size_t>(i)], 1), gathered.read().slice(i, 1)));
      }
    }
  }
}

TEST_P(RowOps, Embed) {
  Random random(36);
  for (MatrixFormat format : kFormats) {
    const int64_t k = columns_for(format, 51);
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
  const int64_t heads = 2, dim = 5, width = 3, page_tokens = 4, table_pages = 3;
  const std::vector<int32_t> table = {4, 1, 0, 2, 5, 3};  // two sequences
  std::vector<float> keys(6 * heads * page_tokens * dim, kNaN), values(6 * heads * page_tokens * width, kNaN);
  KvView kv{keys.data(), values.data(), heads, dim, page_tokens, table_pages, table.data(), width};
  const std::vector<int32_t> positions = {0, 5, 13}, slots = {0, 1, 1};  // 13: around the ring, page 0
  RowsBuffer k = RowsBuffer::random(random, 3, heads * dim, 1),
             v = RowsBuffer::random(random, 3, heads * width, 2);
  ops_->write_kv(k.view(), v.view(), {3, positions.data(), slots.data()}, kv);
  const std::vector<int64_t> pages = {4, 5, 2}, places = {0, 1, 1};
  for (size_t t = 0; t < 3; ++t) {
    for (int64_t g = 0; g < heads; ++g) {
      const int64_t at = (pages[t] * heads + g) * page_tokens + places[t], row = static_cast<int64_t>(t);
      EXPECT_TRUE(same_bits(keys.data() + at * dim, k.view().row(row) + g * dim, dim));
      EXPECT_TRUE(same_bits(values.data() + at * width, v.view().row(row) + g * width, width));
    }
  }
  EXPECT_EQ(std::count_if(keys.begin(), keys.end(), [](float f) { return !std::isnan(f); }), 3 * heads * dim);
}

INSTANTIATE_ON_ALL_BACKENDS(RowOps);

}  // namespace
}  // namespace nibble::testing
