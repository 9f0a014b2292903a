#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace nibble {

RopeSpec read_rope(Config config, int64_t head_dim) {
  RopeSpec spec;
  // "type" is the older spelling of "rope_type".
  const char* type_key = config.has("rope_type") ? "rope_type" : "type";
  config.only(type_key, {"default", "yarn"});
  spec.type = config.text(type_key, "default") == "yarn" ? RopeSpec::Type::kYarn : RopeSpec::Type::kDefault;
  spec.theta = config.number("rope_theta", 2, 1e12);
  double partial = config.number("partial_rotary_factor", 0, 1, 1.0);
  spec.rotary_dim = static_cast<int64_t>(static_cast<double>(head_dim) * partial);
  if (spec.rotary_dim < 2 || spec.rotary_dim % 2 != 0) {
    config.fail(fmt::format("key {}: gives {} of {} dims to rotate; wanted an even number of at least 2",
                            config.describe("partial_rotary_factor"), spec.rotary_dim, head_dim));
    spec.rotary_dim = 2;
  }
  if (spec.type == RopeSpec::Type::kYarn) {
    spec.factor = config.number("factor", 1, 1e6);
    spec.original_max_positions = config.number("original_max_position_embeddings", 1, 1e9);
    spec.beta_fast = config.number("beta_fast", 1e-3, 1e6, 32.0);
    spec.beta_slow = config.number("beta_slow", 1e-3, 1e6, 1.0);
    spec.truncate = config.boolean("truncate", true);
    if (config.has("attention_factor")) spec.attention_factor = config.number("attention_factor", 1e-3, 1e3);
  }
  return spec;
}

RopeFrequencies rope_frequencies(const RopeSpec& spec) {
  const double dim = static_cast<double>(spec.rotary_dim);
  RopeFrequencies result;
  // The dimension whose wavelength makes `rotations` turns over the original context.
  auto correction_dim = [&](double rotations) {
    return dim * std::log(spec.original_max_positions / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(spec.theta));
  };
  double low = 0, high = 0;
  if (spec.type == RopeSpec::Type::kYarn) {
    low = correction_dim(spec.beta_fast);
    high = correction_dim(spec.beta_slow);
    if (spec.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1);
    if (high == low) high += 0.001;  // as the models' own code avoids the division by zero
    result.attention_factor = static_cast<float>(
        spec.attention_factor.value_or(spec.factor > 1 ? 0.1 * std::log(spec.factor) + 1 : 1.0));
  }
  for (int64_t i = 0; i < spec.rotary_dim / 2; ++i) {
    double inv_freq = 1 / std::pow(spec.theta, static_cast<double>(2 * i) / dim);
    if (spec.type == RopeSpec::Type::kYarn) {
      double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      inv_freq = ramp * inv_freq / spec.factor + (1 - ramp) * inv_freq;
    }
    result.inv_freq.push_back(static_cast<float>(inv_freq));
  }
  return result;
}

}  // namespace nibble
