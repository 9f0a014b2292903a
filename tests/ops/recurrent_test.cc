// Operations with a state that goes on from step to step: causal convolution and delta attention. Each is
// held to its formula in float64, with sequences that enter the steps in pieces and side by side; and to
// itself, one sequence alone and token by token.
#include <optional>

#include "ops/backends.h"

namespace nibble::testing {
namespace {

constexpr int64_t kSlots = 4;
// The sequences' slots; slot 1 belongs to nobody.
constexpr int32_t kSlotOf[] = {2, 0, 3};
constexpr int64_t kTokensOf[] = {23, 9, 1};

// Which tokens of which sequence a step holds.
struct Piece {
  size_t sequence;
  int64_t first, count;
};
using Schedule = std::vector<std::vector<Piece>>;

// Three sequences side by side, in pieces of every kind: many rows, one row, none.
const Schedule kInterleaved = {{{1, 0, 2}, {0, 0, 7}},
                               {{0, 7, 1}, {2, 0, 1}, {1, 2, 5}},
                               {{0, 8, 1}},
                               {{1, 7, 1}, {0, 9, 13}},
                               {{0, 22, 1}, {1, 8, 1}}};
// One after the other, a token a step.
Schedule one_by_one() {
  Schedule steps;
  for (size_t s = 0; s < 3; ++s) {
    for (int64_t t = 0; t < kTokensOf[s]; ++t) steps.push_back({{s, t, 1}});
  }
  return steps;
}

// The rows of a step out of rows of each sequence, and back.
struct StepRows {
  std::vector<int32_t> positions, slots;
  const std::vector<Piece>& pieces;

  explicit StepRows(const std::vector<Piece>& pieces_) : pieces(pieces_) {
    for (const Piece& piece : pieces) {
      for (int64_t i = 0; i < piece.count; ++i) {
        positions.push_back(static_cast<int32_t>(piece.first + i));
        slots.push_back(kSlotOf[piece.sequence]);
      }
    }
  }
  RowsOfStep rows() const { return {std::ssize(positions), positions.data(), slots.data()}; }
  template <class Move>
  void each(Move move) const {  // move(sequence, its token, row of the step)
    int64_t row = 0;
    for (const Piece& piece : pieces) {
      for (int64_t i = 0; i < piece.count; ++i) move(piece.sequence, piece.first + i, row++);
    }
  }
  RowsBuffer collect(const std::vector<RowsBuffer>& of_sequence, int64_t gap) const {
    const int64_t cols = of_sequence[0].view().cols;
    RowsBuffer out(std::ssize(positions), cols, gap);
    each([&](size_t s, int64_t token, int64_t row) {
      std::copy_n(of_sequence[s].view().row(token), cols, out.view().row(row));
    });
    return out;
  }
  void distribute(const RowsBuffer& rows, std::vector<RowsBuffer>& of_sequence) const {
    each([&](size_t s, int64_t token, int64_t row) {
      std::copy_n(rows.view().row(row), rows.view().cols, of_sequence[s].view().row(token));
    });
  }
};

std::vector<RowsBuffer> random_sequences(Random& random, int64_t cols, float factor = 1) {
  std::vector<RowsBuffer> out;
  for (int64_t tokens : kTokensOf) {
    out.push_back(RowsBuffer::random(random, tokens, cols));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < cols; ++i) out.back().view().row(t)[i] *= factor;
    }
  }
  return out;
}
std::vector<RowsBuffer> empty_sequences(int64_t cols) {
  std::vector<RowsBuffer> out;
  for (int64_t tokens : kTokensOf) out.emplace_back(tokens, cols);
  return out;
}

// Zero for the three sequences, NaN for the slot of nobody.
std::vector<float> fresh_state(int64_t of_slot) {
  std::vector<float> state(static_cast<size_t>(kSlots * of_slot), 0.0f);
  std::fill_n(state.begin() + of_slot, of_slot, kNaN);
  return state;
}

struct Outcome {
  std::vector<RowsBuffer> out;  // of each sequence
  std::vector<float> state;
};

void expect_same(const Outcome& a, const Outcome& b) {
  for (size_t s = 0; s < 3; ++s) EXPECT_TRUE(same_bits(a.out[s].read(), b.out[s].read())) << "sequence " << s;
  EXPECT_TRUE(same_bits(a.state.data(), b.state.data(), std::ssize(a.state)));
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class CausalConv : public OnEveryBackend {
 protected:
  Outcome run(const Schedule& steps, const std::vector<RowsBuffer>& x, const std::vector<float>& weight,
              int64_t taps, bool in_place) {
    const int64_t channels = x[0].view().cols;
    Outcome outcome{empty_sequences(channels), fresh_state((taps - 1) * channels)};
    for (const std::vector<Piece>& pieces : steps) {
      StepRows step(pieces);
      RowsBuffer in = step.collect(x, 2), out(step.rows().count, channels, in_place ? 2 : 1);
      if (in_place) out = in;
      ops_->causal_conv({in_place ? out.read() : in.read(), weight.data(), taps, outcome.state.data(),
                         step.rows(), out.view()});
      EXPECT_TRUE(out.gaps_untouched());
      step.distribute(out, outcome.out);
    }
    return outcome;
  }
};

TEST_P(CausalConv, AgreesWithTheFormula) {
  Judge judge("causal_conv");
  Random random(61);
  for (int64_t taps : {2, 4, 5}) {
    for (int64_t channels : {1, 7, 64, 130}) {
      const std::vector<RowsBuffer> x = random_sequences(random, channels, 2);
      const std::vector<float> weight = random.floats(channels * taps);
      const Outcome outcome = run(kInterleaved, x, weight, taps, false);
      for (size_t s = 0; s < 3; ++s) {
        auto input = [&](int64_t t, int64_t c) { return t < 0 ? 0.0 : double{x[s].view().row(t)[c]}; };
        for (int64_t t = 0; t < kTokensOf[s]; ++t) {
          for (int64_t c = 0; c < channels; ++c) {
            double sum = 0, magnitude = 0;
            for (int64_t j = 0; j < taps; ++j) {
              const double product = weight[static_cast<size_t>(c * taps + j)] * input(t - taps + 1 + j, c);
              sum += product, magnitude += std::fabs(product);
            }
            // The slope of silu is below 1.1; exp and the division are off by some units of the result, and
            // exp by a share of its argument.
            const double wanted = sum * sigmoid(sum);
            judge.check(outcome.out[s].view().row(t)[c], wanted,
                        kEpsilon * (1.1 * (static_cast<double>(taps) + 1) * magnitude +
                                    (8 + std::fabs(sum)) * std::fabs(wanted)),
                        "taps " + std::to_string(taps) + ", token " + std::to_string(t));
          }
        }
        // What is kept are the last inputs themselves, oldest first.
        for (int64_t j = 0; j < taps - 1; ++j) {
          for (int64_t c = 0; c < channels; ++c) {
            const int64_t at = (kSlotOf[s] * (taps - 1) + j) * channels + c;
            ASSERT_EQ(outcome.state[static_cast<size_t>(at)], input(kTokensOf[s] - taps + 1 + j, c));
          }
        }
      }
    }
  }
}

TEST_P(CausalConv, StepsNeighboursPlaceAndThreadsChangeNoBit) {
  Random random(62);
  for (int64_t channels : {7, 130, 700}) {
    const std::vector<RowsBuffer> x = random_sequences(random, channels, 2);
    const std::vector<float> weight = random.floats(channels * 4);
    const Outcome wanted = run(one_by_one(), x, weight, 4, false);
    expect_same(run(kInterleaved, x, weight, 4, false), wanted);
    expect_same(run(kInterleaved, x, weight, 4, true), wanted);
    for (int threads : {1, 3, 7}) {
      ops_ = make_ops(GetParam(), threads);
      expect_same(run(kInterleaved, x, weight, 4, true), wanted);
    }
  }
}

// One sequence of kda in float64, with bounds of what float32 may be off by. Errors of the state only add up:
// decay shrinks them, and I - beta k k^T does not make them longer, as |k| <= 1 and 0 <= beta <= 1.
class DeltaAttention {
 public:
  DeltaAttention(int64_t dim) : dim_(dim), state_(static_cast<size_t>(dim * dim)), error_(dim_size()) {}

  struct Token {
    const float *q, *k, *v, *decay;
    float beta;
  };
  // The output of the next token, and the bound of its error, for each j.
  std::pair<std::vector<double>, std::vector<double>> next(const Token& token, const float* dt_bias,
                                                           double a_log, std::optional<double> bound) {
    const auto k_dim = static_cast<double>(dim_);
    const double dot_error = (3 * k_dim / 16 + 24) * kEpsilon;  // of a dot product, inputs included
    const std::vector<double> q = unit(token.q, 1 / std::sqrt(k_dim)), k = unit(token.k, 1);
    double worst_keep_error = 0;
    std::vector<double> keep(dim_size());
    for (size_t i = 0; i < dim_size(); ++i) {
      const double u = static_cast<double>(token.decay[i]) + dt_bias[i], rate = std::exp(a_log), x = rate * u;
      double g = 0, error = 0;
      if (bound) {
        g = *bound * sigmoid(x);
        error = std::fabs(*bound) * sigmoid(x) * (8 + (1 - sigmoid(x)) * 8 * std::fabs(x));
      } else {
        const double softplus = std::max(u, 0.0) + std::log1p(std::exp(-std::fabs(u)));
        g = -rate * softplus;
        error = rate * (sigmoid(u) * 2 * std::fabs(u) + 16 * softplus);
      }
      keep[i] = std::exp(g);
      worst_keep_error = std::max(worst_keep_error, keep[i] * (error + 2 * std::fabs(g) + 4) * kEpsilon);
    }
    const double beta = sigmoid(token.beta);
    std::vector<double> out(dim_size()), tolerance(dim_size());
    for (size_t j = 0; j < dim_size(); ++j) {
      double length = column_length(j), dot = 0;
      error_[j] += (worst_keep_error + kEpsilon) * length;
      for (size_t i = 0; i < dim_size(); ++i) {
        state(i, j) *= keep[i];
        dot += state(i, j) * k[i];
      }
      const double delta = beta * (token.v[j] - dot);
      error_[j] += beta * (dot_error * length +
                           (16 + std::fabs(token.beta)) * kEpsilon * (std::fabs(token.v[j]) + length)) +
                   std::fabs(delta) * dot_error;
      for (size_t i = 0; i < dim_size(); ++i) {
        state(i, j) += k[i] * delta;
        out[j] += state(i, j) * q[i];
      }
      length = column_length(j);
      error_[j] += kEpsilon * length;
      tolerance[j] = (error_[j] + dot_error * length) / std::sqrt(k_dim);
    }
    return {out, tolerance};
  }
  double& state(size_t i, size_t j) { return state_[i * dim_size() + j]; }
  double error(size_t j) const { return error_[j]; }

 private:
  size_t dim_size() const { return static_cast<size_t>(dim_); }
  std::vector<double> unit(const float* x, double scale) const {
    double sum = 0;
    for (size_t i = 0; i < dim_size(); ++i) sum += static_cast<double>(x[i]) * x[i];
    std::vector<double> out(dim_size());
    for (size_t i = 0; i < dim_size(); ++i) out[i] = x[i] / std::sqrt(sum + 1e-6) * scale;
    return out;
  }
  double column_length(size_t j) {
    double sum = 0;
    for (size_t i = 0; i < dim_size(); ++i) sum += state(i, j) * state(i, j);
    return std::sqrt(sum);
  }

  int64_t dim_;
  std::vector<double> state_;  // [key, value]
  std::vector<double> error_;  // of a column of the state, its length
};

class Kda : public OnEveryBackend {
 protected:
  struct Inputs {
    int64_t heads, dim;
    std::vector<RowsBuffer> q, k, v, decay, beta;  // of each sequence
    std::vector<float> dt_bias, a_log;
    std::optional<float> bound;

    Inputs(Random& random, int64_t heads_, int64_t dim_, std::optional<float> bound_)
        : heads(heads_),
          dim(dim_),
          q(random_sequences(random, heads * dim, 3)),
          k(random_sequences(random, heads * dim)),
          v(random_sequences(random, heads * dim)),
          decay(random_sequences(random, heads * dim, 2)),
          beta(random_sequences(random, heads, 2)),
          dt_bias(random.floats(heads * dim)),
          a_log(random.floats(heads)),
          bound(bound_) {
      // A key of nothing, and one head that forgets next to nothing.
      std::fill_n(k[0].view().row(3), dim, 0.0f);
      for (int64_t i = 0; i < dim; ++i) dt_bias[static_cast<size_t>(i)] = -30;
    }
  };
  Outcome run(const Schedule& steps, const Inputs& in) {
    const int64_t cols = in.heads * in.dim;
    Outcome outcome{empty_sequences(cols), fresh_state(cols * in.dim)};
    for (const std::vector<Piece>& pieces : steps) {
      StepRows step(pieces);
      RowsBuffer q = step.collect(in.q, 1), k = step.collect(in.k, 2), v = step.collect(in.v, 3);
      RowsBuffer decay = step.collect(in.decay, 4), beta = step.collect(in.beta, 1);
      RowsBuffer out(step.rows().count, cols, 5);
      ops_->kda({q.read(), k.read(), v.read(), decay.read(), beta.read(), in.dt_bias.data(), in.a_log.data(),
                 in.bound, outcome.state.data(), step.rows(), out.view()});
      EXPECT_TRUE(out.gaps_untouched());
      step.distribute(out, outcome.out);
    }
    return outcome;
  }
};

TEST_P(Kda, AgreesWithTheFormula) {
  Judge judge("kda"), state_judge("kda_state");
  Random random(63);
  for (const auto& shape : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {2, 16}, {5, 33}, {2, 64}, {2, 128}}) {
    const int64_t heads = shape.first, dim = shape.second;
    for (std::optional<float> bound : {std::optional<float>(-5.0f), std::optional<float>()}) {
      Inputs in(random, heads, dim, bound);
      Outcome outcome = run(kInterleaved, in);
      for (size_t s = 0; s < 3; ++s) {
        for (int64_t h = 0; h < heads; ++h) {
          DeltaAttention formula(dim);
          const std::string where = "dim " + std::to_string(dim) + ", head " + std::to_string(h);
          for (int64_t t = 0; t < kTokensOf[s]; ++t) {
            auto of = [&](const std::vector<RowsBuffer>& x) { return x[s].view().row(t) + h * dim; };
            auto [wanted, tolerance] =
                formula.next({of(in.q), of(in.k), of(in.v), of(in.decay), in.beta[s].view().row(t)[h]},
                             in.dt_bias.data() + h * dim, in.a_log[static_cast<size_t>(h)], bound);
            for (int64_t j = 0; j < dim; ++j) {
              judge.check(of(outcome.out)[j], wanted[static_cast<size_t>(j)],
                          tolerance[static_cast<size_t>(j)], where + ", token " + std::to_string(t));
            }
          }
          const float* state = outcome.state.data() + (kSlotOf[s] * heads + h) * dim * dim;
          for (int64_t i = 0; i < dim * dim; ++i) {
            const auto row = static_cast<size_t>(i / dim), column = static_cast<size_t>(i % dim);
            state_judge.check(state[i], formula.state(row, column), formula.error(column), where);
          }
        }
      }
    }
  }
}

TEST_P(Kda, StepsNeighboursAndThreadsChangeNoBit) {
  Random random(64);
  for (auto [heads, dim] : {std::pair<int64_t, int64_t>{3, 7}, {2, 128}}) {
    Inputs in(random, heads, dim, -5.0f);
    const Outcome wanted = run(one_by_one(), in);
    for (int threads : {1, 2, 3, 7}) {
      ops_ = make_ops(GetParam(), threads);
      expect_same(run(kInterleaved, in), wanted);
    }
  }
}

INSTANTIATE_ON_ALL_BACKENDS(CausalConv);
INSTANTIATE_ON_ALL_BACKENDS(Kda);

}  // namespace
}  // namespace nibble::testing
