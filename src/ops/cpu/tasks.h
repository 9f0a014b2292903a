// How work is cut into tasks: pure functions of shapes and threads. No result depends on them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/numbers.h"

namespace nibble::cpu {

// Below this a task costs more to hand to a thread (about 1 us, awake) than it is worth.
inline constexpr int64_t kTask_ns = 4000;

// Items of `item_ns` each that make one task: worth kTask_ns at least, and else four tasks a thread, which
// evens out threads of unequal speed.
inline int64_t items_per_task(int64_t count, int64_t item_ns, int threads) {
  int64_t even = ceil_div(count, static_cast<int64_t>(threads) * 4);
  return std::min(count, std::max(even, ceil_div(kTask_ns, std::max<int64_t>(item_ns, 1))));
}

// Weight rows (of n, with `row_bytes` each, in all `total_rows` such rows in the loop) that make one task of
// a product with `rows` activation rows: at most 256 KB of weights, four tasks a thread where that leaves
// each worth its kTask_ns, a multiple of `unit` (an even number of tiles, which AMX takes in pairs).
inline int64_t weight_rows_per_task(int64_t n, int64_t total_rows, int64_t row_bytes, int64_t rows,
                                    int threads, int64_t unit) {
  // One core: about 20 GB/s of weights or, with many rows, a column of 1000 bytes times a row in 40 ns.
  int64_t row_ns = std::max<int64_t>(1, row_bytes / 20 * std::max<int64_t>(1, rows));
  int64_t most = std::max<int64_t>(1, (256 << 10) / row_bytes);
  int64_t each = std::min(most, items_per_task(total_rows, row_ns, threads));
  return std::min(n, round_up(each, unit));
}

}  // namespace nibble::cpu
