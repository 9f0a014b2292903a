// The table of contents that a checkpoint of a spec would have.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/spec.h"
#include "quant/matrix.h"

namespace nibble {

struct SyntheticTensor {
  std::string name;  // of a matrix the module's, without ".weight"
  std::vector<int64_t> shape;
  MatrixFormat format = MatrixFormat::kF32;  // F32: a vector or small tensor, to be read as floats
};

// Routed experts in `experts`, other matrices in BF16. What the spec allows and no synthetic model has
// (biases, sinks, stacked experts, a tied head) is not listed, and the weight loader would miss it.
std::vector<SyntheticTensor> synthetic_tensors(const ModelSpec& spec,
                                               MatrixFormat experts = MatrixFormat::kNvfp4);

}  // namespace nibble
