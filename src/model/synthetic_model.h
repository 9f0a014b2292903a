// Models that are no files: the shapes of a released model with made-up weights, for benches and for machines
// without the gigabytes.
#pragma once

#include <string>

#include "base/result.h"
#include "model/spec.h"
#include "quant/matrix.h"

namespace nibble {

// Names of such models start so; the rest is a model of synthetic_spec, and what of it to take:
// "synthetic:laguna-s-2.1:layers=4:experts=64:format=q4".
inline constexpr const char* kSyntheticPrefix = "synthetic:";

inline bool is_synthetic(const std::string& model) { return model.starts_with(kSyntheticPrefix); }

// `layers=N` keeps the first N layers, `experts=N` so many routed experts in each, `format=F` has these in
// nvfp4 (the default), q4 or bf16. Another model or option, and more than the model has or fewer than a token
// chooses, is an error that says what there is. REQUIRES is_synthetic(model).
Result<ModelSpec> synthetic_spec(const std::string& model);
// What its routed experts are in.
MatrixFormat synthetic_format(const std::string& model);

}  // namespace nibble
