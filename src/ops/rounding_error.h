// How far products that round activations are from exact ones: measured, for telling the user.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace nibble {

// Of the products with matrices of one format, as shares of the exact products' root mean square.
struct RoundingError {
  MatrixFormat format;
  double rms, worst;
};

// Multiplies random rows with parts of these placed matrices, both ways: milliseconds. One entry for each
// format whose products differ. REQUIRES that host code can read the backend's memory.
std::vector<RoundingError> measure_rounding(Ops& ops, std::span<const Matrix> placed);

// "0.52% (at worst 2.4%) in NVFP4, 0.16% (at worst 0.7%) in BF16"; "nothing" where there are none.
std::string describe(std::span<const RoundingError> errors);

}  // namespace nibble
