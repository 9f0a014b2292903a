// Feed-forward sublayers: dense, and mixture of experts.
#pragma once

#include "model/step.h"
#include "model/weights.h"

namespace nibble {

// The feed-forward sublayer of layer `layer`, from step.input to step.add_to or act.sublayer.
void feed_forward(Step& step, size_t layer, const LayerSpec& spec, const FfnWeights& weights);

}  // namespace nibble
