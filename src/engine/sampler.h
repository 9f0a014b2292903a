// From logits to the next token: penalties, filters, draw. On the host, one sequence at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "ops/op_args.h"

namespace nibble {

// Defaults are those that the field's users know.
struct SamplingParams {
  float temperature = 0.8f;        // 0: greedy, the lowest id among equals
  int32_t top_k = 40;              // 0: off
  float top_p = 0.95f;             // 1: off
  float min_p = 0.05f;             // 0: off; relative to the most likely token
  float repeat_penalty = 1.0f;     // 1: off; divides positive logits of seen tokens, multiplies negative ones
  float presence_penalty = 0.0f;   // subtracted once from a token that was seen
  float frequency_penalty = 0.0f;  // subtracted for each time that it was seen
  int32_t penalty_last_n = 64;     // how far back "seen" reaches; -1: all
  uint64_t seed = 0;

  // A value out of range is an error that names the field.
  Status check() const;
};

// Draws with its own counter-based random numbers: what a sequence gets at its n-th token depends on its seed
// and n alone, whatever else the machine is doing.
class Sampler {
 public:
  // REQUIRES params.check().ok().
  explicit Sampler(const SamplingParams& params);

  // Whether the kTopLogits largest logits are all that sample() can choose from.
  bool needs_top_only() const;
  // The next token for these [min(V, kTopLogits)] in the order of Ops::top_logits. REQUIRES needs_top_only().
  int32_t sample_top(std::span<const TokenLogit> top);
  // The next token for `logits` [V], after `history` (prompt and what was generated). The order is:
  // penalties, top-k, top-p, min-p, temperature, draw.
  int32_t sample(std::span<const float> logits, std::span<const int32_t> history);

 private:
  int32_t draw();  // from candidates_
  void apply_penalties(std::span<const int32_t> history);
  void keep_top_k();
  void keep_top_p_and_min_p(double top);
  // The i-th candidate from the most likely one; equal logits by id, so that the order is one. Sorts as far
  // as it is asked, since a vocabulary has 100,000 candidates and a draw seldom looks at more than some
  // dozens.
  const TokenLogit& ranked(size_t i);
  double uniform();  // in [0, 1)

  SamplingParams params_;
  uint64_t draws_ = 0;
  std::vector<TokenLogit> candidates_;  // kept between calls for its memory
  size_t sorted_ = 0;                   // of candidates_, at its beginning
};

}  // namespace nibble
