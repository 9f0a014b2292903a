// The working memory of a forward pass: one allocation, planned from the spec, cut into named views.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "model/spec.h"
#include "ops/memory.h"

namespace nibble {

// The views of one step. T: rows of the step; L: rows whose logits are wanted.
struct Activations {
  Rows<float> residual;                     // [T, D], or [T, S*D] of S streams
  Rows<float> collected;                    // [T, D] what a sublayer starts from, where there are streams
  Rows<float> mix, normed_streams;          // [T, 2S + S*S], [T, S*D], where there are streams
  Rows<float> normed, sublayer;             // [T, D]; sublayer: what attention or feed-forward adds
  Rows<float> shared;                       // [T, D] output of the shared expert
  std::vector<Rows<float>> mixer;           // [T, *] scratch of attention and its kin, by their own numbering
  Rows<int32_t> selected, selected_counts;  // [T, top_k + pool - 1], [T, 1] what sparse attention chose
  Rows<float> ffn_gate, ffn_up;             // [T, max dense or shared width]
  Rows<float> router_logits;                // [T, max E]
  Rows<int32_t> expert_ids;                 // [T, max A]
  Rows<float> expert_weights;               // [T, max A]
  Rows<float> expert_gathered, expert_down;  // [T * max A, D]
  Rows<float> expert_gate, expert_up;        // [T * max A, max I]
  std::vector<Rows<float>> ropes;            // [T, rotary_dim] of each ModelSpec::ropes
  Rows<int32_t> indices;                     // [3T + L, 1] ids, positions and slots of rows; rows with logits
  Rows<float> logit_inputs;                  // [L, residual width]
  Rows<float> logit_normed;                  // [L, D]
  Rows<float> logits;                        // [L, V]
  Rows<TokenLogit> top_logits;               // [L, min(V, kTopLogits)]
};

class ActivationMemory {
 public:
  static Result<int64_t> plan_bytes(const ModelSpec& spec, int64_t max_rows, int64_t max_logit_rows);
  static Result<ActivationMemory> allocate(Memory& memory, const ModelSpec& spec, int64_t max_rows,
                                           int64_t max_logit_rows);

  // REQUIRES rows and logit_rows within what was allocated, and the spec of allocate().
  Activations views(const ModelSpec& spec, int64_t rows, int64_t logit_rows) const;

  int64_t bytes() const { return buffer_.bytes(); }

 private:
  Activations views_;  // at the maximum
  Buffer buffer_;
  int64_t max_rows_ = 0, max_logit_rows_ = 0;
};

}  // namespace nibble
