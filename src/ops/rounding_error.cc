#include "ops/rounding_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace nibble {
namespace {

constexpr int64_t kRows = 16, kMostWeightRows = 256;

// Sums over the products of a format.
struct Sums {
  MatrixFormat format;
  double squares = 0, error_squares = 0, worst = 0;
};

}  // namespace

std::vector<RoundingError> measure_rounding(Ops& ops, std::span<const Matrix> placed) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<Sums> all;
  for (const Matrix& matrix : placed) {
    Matrix part = matrix;
    part.n = std::min(part.n, kMostWeightRows);
    std::vector<float> x(static_cast<size_t>(kRows * part.k)), exact(static_cast<size_t>(kRows * part.n)),
        found(exact.size());
    std::ranges::generate(x, [&] { return normal(random); });
    ops.exact_linear({x.data(), kRows, part.k}, part, {exact.data(), kRows, part.n});
    ops.linear({x.data(), kRows, part.k}, part, {found.data(), kRows, part.n});
    auto sums = std::ranges::find(all, part.format, &Sums::format);
    if (sums == all.end()) sums = all.insert(all.end(), Sums{part.format});
    double squares = 0, worst = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const double error = std::fabs(static_cast<double>(found[i]) - exact[i]);
      squares += static_cast<double>(exact[i]) * exact[i];
      sums->error_squares += error * error;
      worst = std::max(worst, error);
    }
    sums->squares += squares;
    if (squares > 0)
      sums->worst = std::max(sums->worst, worst / std::sqrt(squares / static_cast<double>(exact.size())));
  }
  std::vector<RoundingError> errors;
  for (const Sums& sums : all) {
    if (sums.error_squares > 0)
      errors.push_back({sums.format, std::sqrt(sums.error_squares / sums.squares), sums.worst});
  }
  return errors;
}

std::string describe(std::span<const RoundingError> errors) {
  std::string text;
  for (const RoundingError& e : errors) {
    text += fmt::format("{}{:.2f}% (at worst {:.1f}%) in {}", text.empty() ? "" : ", ", e.rms * 100,
                        e.worst * 100, matrix_format_name(e.format));
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace nibble
