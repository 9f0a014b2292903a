// The rotary table on the host, shared by the backends whose memory is the host's.
#pragma once

#include "ops/ops.h"

namespace nibble {

// One row of Ops::rope_table: `out` has the cosines, then the sines. The angle is rounded to float32 as in
// the models' own code: at large positions that rounding is part of what they were trained with.
void rope_table_row_on_host(int32_t position, std::span<const float> inv_freq, float factor, float* out);

}  // namespace nibble
