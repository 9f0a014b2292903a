// Feed-forward sublayers: dense, and mixture of experts.
#pragma once

#include "model/step.h"
#include "model/weights.h"

namespace nibble {

// act.sublayer = FeedForward(act.normed) for layer `layer`.
void feed_forward(Step& step, size_t layer, const LayerSpec& spec, const FfnWeights& weights);

}  // namespace nibble
