#include "ops/expert_groups.h"

namespace nibble {

ExpertGroups group_by_expert(Rows<const int32_t> ids, int64_t experts) {
  ExpertGroups groups;
  const int64_t chosen = ids.cols, rows = ids.rows * chosen;
  groups.begin.assign(static_cast<size_t>(experts) + 1, 0);
  for (int64_t t = 0; t < ids.rows; ++t) {
    for (int64_t a = 0; a < chosen; ++a) {
      NIBBLE_CHECK(ids.row(t)[a] >= 0 && ids.row(t)[a] < experts);
      ++groups.begin[static_cast<size_t>(ids.row(t)[a]) + 1];
    }
  }
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e) groups.begin[e + 1] += groups.begin[e];
  std::vector<int64_t> next = groups.begin;
  groups.token.resize(static_cast<size_t>(rows));
  groups.row_of.resize(static_cast<size_t>(rows));
  for (int64_t t = 0; t < ids.rows; ++t) {
    for (int64_t a = 0; a < chosen; ++a) {
      const int64_t row = next[static_cast<size_t>(ids.row(t)[a])]++;
      groups.token[static_cast<size_t>(row)] = static_cast<int32_t>(t);
      groups.row_of[static_cast<size_t>(t * chosen + a)] = row;
    }
  }
  return groups;
}

}  // namespace nibble
