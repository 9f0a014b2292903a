// Rotary position embedding: the frequencies of each scaling type that we implement.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "model/config.h"

namespace nibble {

struct RopeSpec {
  enum class Type { kDefault, kYarn, kLlama3 };
  Type type = Type::kDefault;
  double theta = 10000;
  int64_t rotary_dim = 0;  // leading elements of a head that turn; even

  double factor = 1;
  double original_max_positions = 0;
  // YaRN (Peng et al. 2023, arXiv 2309.00071).
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;                    // the correction range is rounded to whole dims
  std::optional<double> attention_factor;  // absent: from mscale, else 0.1 ln(factor) + 1
  double mscale = 0, mscale_all_dim = 0;   // DeepSeek's two factors; 0: not given
  // Llama 3.
  double low_freq_factor = 1, high_freq_factor = 4;

  bool operator==(const RopeSpec&) const = default;
};

struct RopeFrequencies {
  std::vector<float> inv_freq;  // [rotary_dim / 2]
  float attention_factor = 1;   // on cos and sin
};

// Reads rope_type, rope_theta, partial_rotary_factor and the type's own keys from `config`. Other types are
// refused by name. `rotary_of` is what the partial factor counts from: the head dim.
RopeSpec read_rope(Config config, int64_t rotary_of);
// The same for a model with one kind of RoPE: from "rope_parameters", or from the older "rope_theta" and
// "rope_scaling" of the whole config.
RopeSpec read_model_rope(Config& config, int64_t rotary_of);

RopeFrequencies rope_frequencies(const RopeSpec& spec);

}  // namespace nibble
