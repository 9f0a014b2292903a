#include "base/numbers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>

namespace nibble {

std::optional<int64_t> checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

std::optional<int64_t> checked_product(std::span<const int64_t> dims) {
  std::optional<int64_t> product = 1;
  for (int64_t dim : dims) {
    // A zero dim makes the product zero, but the dims after it must still be sane.
    product = checked_mul(*product, dim);
    if (!product) return std::nullopt;
  }
  return product;
}

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string format_shape(std::span<const int64_t> dims) { return fmt::format("[{}]", fmt::join(dims, ", ")); }

}  // namespace nibble
