#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace nibble {
namespace {

// The type and its own keys.
void read_scaling(Config& config, RopeSpec& spec) {
  // "type" is the older spelling of "rope_type"; some files have both.
  if (config.has("rope_type")) config.ignore({"type"});
  const char* type_key = config.has("rope_type") ? "rope_type" : "type";
  config.only(type_key, {"default", "yarn", "llama3"});
  const std::string type = config.text(type_key, "default");
  if (type == "default") return;
  spec.type = type == "yarn" ? RopeSpec::Type::kYarn : RopeSpec::Type::kLlama3;
  spec.factor = config.number("factor", 1, 1e6);
  spec.original_max_positions = config.number("original_max_position_embeddings", 1, 1e9);
  if (spec.type == RopeSpec::Type::kLlama3) {
    spec.low_freq_factor = config.number("low_freq_factor", 1e-3, 1e6);
    spec.high_freq_factor = config.number("high_freq_factor", 1e-3, 1e6);
    if (spec.high_freq_factor <= spec.low_freq_factor) {
      config.fail(
          fmt::format("key {}: wanted more than low_freq_factor", config.describe("high_freq_factor")));
    }
    return;
  }
  spec.beta_fast = config.number("beta_fast", 1e-3, 1e6, 32.0);
  spec.beta_slow = config.number("beta_slow", 1e-3, 1e6, 1.0);
  spec.truncate = config.boolean("truncate", true);
  spec.mscale = config.number("mscale", 0, 1e3, 0.0);
  spec.mscale_all_dim = config.number("mscale_all_dim", 0, 1e3, 0.0);
  if (config.has("attention_factor")) spec.attention_factor = config.number("attention_factor", 1e-3, 1e3);
}

void set_rotary_dim(Config& config, RopeSpec& spec, int64_t rotary_of, double partial) {
  spec.rotary_dim = static_cast<int64_t>(static_cast<double>(rotary_of) * partial);
  if (spec.rotary_dim >= 2 && spec.rotary_dim % 2 == 0) return;
  config.fail(fmt::format("key {}: gives {} of {} dims to rotate; wanted an even number of at least 2",
                          config.describe("partial_rotary_factor"), spec.rotary_dim, rotary_of));
  spec.rotary_dim = 2;
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

double attention_factor(const RopeSpec& spec) {
  if (spec.type != RopeSpec::Type::kYarn) return 1;
  if (spec.attention_factor) return *spec.attention_factor;
  if (spec.mscale > 0 && spec.mscale_all_dim > 0) {
    return yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim);
  }
  return yarn_mscale(spec.factor, 1);
}

}  // namespace

RopeSpec read_rope(Config config, int64_t rotary_of) {
  RopeSpec spec;
  spec.theta = config.number("rope_theta", 2, 1e12);
  set_rotary_dim(config, spec, rotary_of, config.number("partial_rotary_factor", 0, 1, 1.0));
  read_scaling(config, spec);
  return spec;
}

RopeSpec read_model_rope(Config& config, int64_t rotary_of) {
  const double partial = config.number("partial_rotary_factor", 0, 1, 1.0);
  if (config.has("rope_parameters")) {
    // The newer files say the partial factor twice; the object's own wins.
    Config inner = config.object("rope_parameters");
    RopeSpec spec = read_rope(inner, rotary_of);
    if (!inner.has("partial_rotary_factor")) set_rotary_dim(config, spec, rotary_of, partial);
    return spec;
  }
  RopeSpec spec;
  spec.theta = config.number("rope_theta", 2, 1e12, 10000.0);
  set_rotary_dim(config, spec, rotary_of, partial);
  if (config.has("rope_scaling")) {
    Config scaling = config.object("rope_scaling");
    read_scaling(scaling, spec);
  } else {
    config.ignore({"rope_scaling"});
  }
  return spec;
}

RopeFrequencies rope_frequencies(const RopeSpec& spec) {
  const double dim = static_cast<double>(spec.rotary_dim);
  RopeFrequencies result;
  result.attention_factor = static_cast<float>(attention_factor(spec));
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
  }
  for (int64_t i = 0; i < spec.rotary_dim / 2; ++i) {
    double inv_freq = 1 / std::pow(spec.theta, static_cast<double>(2 * i) / dim);
    if (spec.type == RopeSpec::Type::kYarn) {
      double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      inv_freq = ramp * inv_freq / spec.factor + (1 - ramp) * inv_freq;
    } else if (spec.type == RopeSpec::Type::kLlama3) {
      // Long waves are stretched by the factor, short ones kept, those between blended.
      const double turns = spec.original_max_positions * inv_freq / (2 * std::numbers::pi);
      const double keep = std::clamp(
          (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor), 0.0, 1.0);
      inv_freq = keep * inv_freq + (1 - keep) * inv_freq / spec.factor;
    }
    result.inv_freq.push_back(static_cast<float>(inv_freq));
  }
  return result;
}

}  // namespace nibble
