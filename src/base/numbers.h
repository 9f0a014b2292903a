// Arithmetic on sizes that come from files: every product is checked before anything is allocated.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace nibble {

// a * b and a + b, or nothing where the result does not fit or an operand is negative.
std::optional<int64_t> checked_mul(int64_t a, int64_t b);
std::optional<int64_t> checked_add(int64_t a, int64_t b);
// The product of all dims (1 for none), or nothing on overflow or a negative dim.
std::optional<int64_t> checked_product(std::span<const int64_t> dims);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

// 1536 -> "1.50 KiB"; for people.
std::string format_bytes(int64_t bytes);
// {2, 3} -> "[2, 3]"
std::string format_shape(std::span<const int64_t> dims);

}  // namespace nibble
