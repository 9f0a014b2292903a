// The bytes of one quantized tensor: reads a part of the source, encodes it, hands it on; bounded memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/result.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_job.h"
#include "checkpoint/quantize_plan.h"

namespace nibble {

// Makes slice `slice` of `item`. Calls `read` with the source bytes that are done, now and then. NaN or
// infinity in a weight to be quantized is an error that names the tensor and the place. Safe for concurrent
// calls.
Status quantize_slice(const Checkpoint& checkpoint, const QuantizeItem& item, int64_t slice,
                      QuantizeType type, const WriteTensor& write,
                      const std::function<void(int64_t bytes)>& read);

}  // namespace nibble
