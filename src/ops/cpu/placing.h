// Weights on their way into the order in which the cpu's kernels read them.
#pragma once

#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "ops/memory.h"
#include "quant/matrix.h"

namespace nibble::cpu {

// Brings matrices into memory of their own, which the result owns, and lets them point there: in tiles, BF16
// in 12 bits, or, where one of them cannot be so, as they are. REQUIRES BF16 or a format that has a
// tile_format() of each.
Result<Buffer> place_weights(ThreadPool& pool, const std::vector<Matrix*>& matrices);

}  // namespace nibble::cpu
