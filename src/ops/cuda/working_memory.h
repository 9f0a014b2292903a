// Memory of the device that operations take for themselves.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/moe_path.h"
#include "ops/step_shape.h"

namespace nibble::cuda {

// Rows of `row_scratch` floats each (attend_row_scratch()) that attention does at once.
inline int64_t attend_rows_at_once(int64_t rows, int64_t row_scratch) {
  constexpr int64_t kMostAtOnce = INT64_C(1) << 26;  // floats, where a row needs no more
  return std::clamp<int64_t>(kMostAtOnce / row_scratch, 1, rows);
}

// Words (of 4 bytes) that expert_ffn without tensor cores takes for a routed row.
inline constexpr int64_t kWordsOfRoutedRow = 4;

// As Ops::working_bytes().
int64_t working_bytes(const StepShape& largest, const MoePaths& paths);

}  // namespace nibble::cuda
