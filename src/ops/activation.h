// What joins the gate and up halves of a feed-forward layer. Plain data without functions: the kernels of
// each instruction set include it (ops/cpu/kernels.h says why that matters).
#pragma once

namespace nibble {

struct ActivationSpec {
  enum Kind {
    kSilu,         // g * sigmoid(g) * u
    kSiluClamped,  // the same of g = min(g, limit), u = clamp(u, -limit, limit)
    kGptOss,       // g * sigmoid(alpha * g) * (u + 1), of g and u limited in the same way
  };
  Kind kind = kSilu;
  float limit = 0;       // > 0 for kSiluClamped and kGptOss
  float alpha = 1.702f;  // kGptOss
};

}  // namespace nibble
