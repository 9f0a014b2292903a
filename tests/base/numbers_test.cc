#include "base/numbers.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace nibble {
namespace {

TEST(Numbers, ProductsThatOverflowAreNothing) {
  EXPECT_EQ(checked_mul(3, 4), 12);
  EXPECT_EQ(checked_mul(INT64_MAX, 2), std::nullopt);
  EXPECT_EQ(checked_mul(-1, 2), std::nullopt);
  EXPECT_EQ(checked_add(INT64_MAX, 1), std::nullopt);
  EXPECT_EQ(checked_product(std::array<int64_t, 3>{2, 3, 4}), 24);
  EXPECT_EQ(checked_product(std::array<int64_t, 0>{}), 1);
  EXPECT_EQ(checked_product(std::array<int64_t, 3>{INT64_C(1) << 40, INT64_C(1) << 40, 0}), std::nullopt);
  EXPECT_EQ(checked_product(std::array<int64_t, 2>{0, -5}), std::nullopt);
}

TEST(Numbers, ForPeople) {
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(INT64_C(36) << 20), "36.00 MiB");
  EXPECT_EQ(format_shape(std::array<int64_t, 2>{2, 3}), "[2, 3]");
}

}  // namespace
}  // namespace nibble
