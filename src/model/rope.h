// Rotary position embedding: the frequencies of each scaling type that we implement.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "model/config.h"

namespace nibble {

struct RopeSpec {
  enum class Type { kDefault, kYarn };
  Type type = Type::kDefault;
  double theta = 10000;
  int64_t rotary_dim = 0;  // leading elements of a head that turn; even

  // YaRN (Peng et al. 2023, arXiv 2309.00071).
  double factor = 1;
  double original_max_positions = 0;
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;                    // the correction range is rounded to whole dims
  std::optional<double> attention_factor;  // absent: 0.1 ln(factor) + 1

  bool operator==(const RopeSpec&) const = default;
};

struct RopeFrequencies {
  std::vector<float> inv_freq;  // [rotary_dim / 2]
  float attention_factor = 1;   // on cos and sin
};

// Reads rope_type, rope_theta, partial_rotary_factor and the type's own keys. Other types are refused by
// name.
RopeSpec read_rope(Config config, int64_t head_dim);

RopeFrequencies rope_frequencies(const RopeSpec& spec);

}  // namespace nibble
