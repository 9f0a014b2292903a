// Residual streams: what a sublayer collects from them and gives back, by the formulas in float64.
#include "ops/backends.h"

namespace nibble::testing {
namespace {

constexpr int64_t kRowCounts[] = {1, 2, 5, 17};
constexpr int64_t kWidths[] = {1, 63, 384};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class Streams : public OnEveryBackend {};

TEST_P(Streams, Weights) {
  Judge judge("hyper_weights");
  Random random(81);
  for (int64_t s : {1, 2, 4, 5}) {
    for (int64_t iterations : {1, 2, 20}) {
      const HyperSpec spec{s, iterations, 1e-6f};
      for (int64_t rows : kRowCounts) {
        RowsBuffer mix = RowsBuffer::random(random, rows, spec.mix_width(), 2), before = mix.with_gap(0);
        const std::vector<float> base = random.floats(spec.mix_width()), scale = random.floats(3);
        ops_->hyper_weights(spec, base.data(), scale.data(), mix.view());
        EXPECT_TRUE(mix.gaps_untouched());
        const std::string where =
            std::to_string(s) + " streams, " + std::to_string(iterations) + " iterations";
        for (int64_t t = 0; t < rows; ++t) {
          const float* found = mix.view().row(t);
          auto logit = [&](int64_t i) {
            return static_cast<double>(before.view().row(t)[i]) * scale[i < s       ? 0
                                                                        : i < 2 * s ? 1
                                                                                    : 2] +
                   base[static_cast<size_t>(i)];
          };
          // An argument is off by two units of its parts, which exp makes a share of its result.
          auto units = [&](int64_t i) -> double {
            return 2 * (std::fabs(before.view().row(t)[i] * scale[i < s       ? 0
                                                                  : i < 2 * s ? 1
                                                                              : 2]) +
                        std::fabs(base[static_cast<size_t>(i)])) +
                   8;
          };
          for (int64_t i = 0; i < s; ++i) {
            const double pre = sigmoid(logit(i)) + spec.eps, post = 2 * sigmoid(logit(s + i));
            judge.check(found[i], pre, units(i) * kEpsilon * pre, where + ", pre");
            judge.check(found[s + i], post, units(s + i) * kEpsilon * post, where + ", post");
          }
          std::vector<std::vector<double>> comb(static_cast<size_t>(s),
                                                std::vector<double>(static_cast<size_t>(s)));
          double most_units = 0;
          for (int64_t i = 0; i < s; ++i) {
            std::vector<double>& row = comb[static_cast<size_t>(i)];
            double sum = 0;
            for (int64_t j = 0; j < s; ++j) {
              sum += row[static_cast<size_t>(j)] = std::exp(logit(2 * s + i * s + j));
              most_units = std::max(most_units, units(2 * s + i * s + j));
            }
            for (double& x : row) x = x / sum + spec.eps;
          }
          auto divide_columns = [&] {
            for (size_t j = 0; j < comb.size(); ++j) {
              double sum = spec.eps;
              for (auto& row : comb) sum += row[j];
              for (auto& row : comb) row[j] /= sum;
            }
          };
          divide_columns();
          for (int64_t n = 1; n < iterations; ++n) {
            for (auto& row : comb) {
              double sum = spec.eps;
              for (double x : row) sum += x;
              for (double& x : row) x /= sum;
            }
            divide_columns();
          }
          // Every division adds the rounding of its sum and of itself; errors of a whole row or column fall
          // out again with the next sum.
          const double relative = (4 * most_units + 2 * static_cast<double>(iterations * (s + 2))) * kEpsilon;
          for (int64_t i = 0; i < s; ++i) {
            for (int64_t j = 0; j < s; ++j) {
              const double wanted = comb[static_cast<size_t>(i)][static_cast<size_t>(j)];
              judge.check(found[2 * s + i * s + j], wanted, relative * wanted, where + ", comb");
            }
          }
        }
      }
    }
  }
}

TEST_P(Streams, CollectDistributeAndMean) {
  Judge collect("hyper_collect"), distribute("hyper_distribute"), mean("hyper_mean");
  Random random(82);
  for (int64_t s : {1, 2, 4, 5}) {
    const HyperSpec spec{s, 1, 0};
    const double roundings = (static_cast<double>(s) + 2) * kEpsilon;
    for (int64_t rows : kRowCounts) {
      for (int64_t width : kWidths) {
        const RowsBuffer streams = RowsBuffer::random(random, rows, s * width, 1);
        const RowsBuffer mix = RowsBuffer::random(random, rows, spec.mix_width(), 2);
        const RowsBuffer y = RowsBuffer::random(random, rows, width, 3);
        RowsBuffer collected(rows, width, 1), average(rows, width, 2), after = streams.with_gap(4);
        ops_->hyper_collect(spec, streams.read(), mix.read(), collected.view());
        ops_->hyper_mean(spec, streams.read(), average.view());
        ops_->hyper_distribute(spec, y.read(), mix.read(), after.view());
        EXPECT_TRUE(collected.gaps_untouched() && average.gaps_untouched() && after.gaps_untouched());
        for (int64_t t = 0; t < rows; ++t) {
          const float* pre = mix.view().row(t);
          const float* post = pre + s;
          const float* comb = post + s;
          for (int64_t d = 0; d < width; ++d) {
            auto stream = [&](int64_t i) {
              return static_cast<double>(streams.view().row(t)[i * width + d]);
            };
            double sum = 0, sum_size = 0, total = 0, total_size = 0;
            for (int64_t i = 0; i < s; ++i) {
              sum += pre[i] * stream(i), sum_size += std::fabs(pre[i] * stream(i));
              total += stream(i), total_size += std::fabs(stream(i));
            }
            const std::string where = std::to_string(s) + " streams of " + std::to_string(width);
            const auto count = static_cast<double>(s);
            collect.check(collected.view().row(t)[d], sum, roundings * sum_size, where);
            mean.check(average.view().row(t)[d], total / count, roundings * total_size / count, where);
            for (int64_t i = 0; i < s; ++i) {
              double wanted = static_cast<double>(post[i]) * y.view().row(t)[d], size = std::fabs(wanted);
              for (int64_t j = 0; j < s; ++j) {
                wanted += comb[j * s + i] * stream(j), size += std::fabs(comb[j * s + i] * stream(j));
              }
              distribute.check(after.view().row(t)[i * width + d], wanted, roundings * size, where);
            }
          }
        }
      }
    }
  }
}

TEST_P(Streams, ARowAloneIsTheRowAmongOthers) {
  Random random(83);
  const HyperSpec spec{4, 20, 1e-6f};
  constexpr int64_t kRows = 13, kWidth = 129;
  RowsBuffer streams = RowsBuffer::random(random, kRows, 4 * kWidth),
             y = RowsBuffer::random(random, kRows, kWidth);
  RowsBuffer mix = RowsBuffer::random(random, kRows, spec.mix_width());
  const std::vector<float> base = random.floats(spec.mix_width()), scale = random.floats(3);
  struct All {
    RowsBuffer mix, collected, streams, mean;
  };
  auto run = [&](int64_t first, int64_t count, All& all) {
    auto part = [&](RowsBuffer& x) { return x.view().slice(first, count); };
    ops_->hyper_weights(spec, base.data(), scale.data(), part(all.mix));
    ops_->hyper_collect(spec, part(all.streams), part(all.mix), part(all.collected));
    ops_->hyper_distribute(spec, part(y), part(all.mix), part(all.streams));
    ops_->hyper_mean(spec, part(all.streams), part(all.mean));
  };
  All together{mix, RowsBuffer(kRows, kWidth), streams, RowsBuffer(kRows, kWidth)}, alone = together;
  run(0, kRows, together);
  for (int64_t t = 0; t < kRows; ++t) run(t, 1, alone);
  EXPECT_TRUE(same_bits(alone.mix.read(), together.mix.read()));
  EXPECT_TRUE(same_bits(alone.collected.read(), together.collected.read()));
  EXPECT_TRUE(same_bits(alone.streams.read(), together.streams.read()));
  EXPECT_TRUE(same_bits(alone.mean.read(), together.mean.read()));
}

INSTANTIATE_ON_ALL_BACKENDS(Streams);

}  // namespace
}  // namespace nibble::testing
