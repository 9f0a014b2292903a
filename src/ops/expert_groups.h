// The rows of a step's routed experts, grouped by expert: stable in (expert, token), so that each expert is
// read once a step and no row's place depends on anything but the routing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/dims.h"

namespace nibble {

struct ExpertGroups {
  std::vector<int64_t> begin;   // [E + 1] the first grouped row of each expert
  std::vector<int32_t> token;   // [T * A] whose row a grouped row is
  std::vector<int64_t> row_of;  // [T * A] the grouped row of (t, a)

  int64_t rows_of(int64_t expert) const {
    return begin[static_cast<size_t>(expert) + 1] - begin[static_cast<size_t>(expert)];
  }
};

// REQUIRES ids [T, A] in host memory, each in [0, experts).
ExpertGroups group_by_expert(Rows<const int32_t> ids, int64_t experts);

}  // namespace nibble
