// Grouped-query attention as a sublayer.
#pragma once

#include "model/step.h"
#include "model/weights.h"

namespace nibble {

// act.sublayer = Attention(act.normed) for layer `layer`; writes the step's keys and values to the KV cache.
void gqa(Step& step, size_t layer, const AttentionSpec& spec, const AttentionWeights& weights);

}  // namespace nibble
