#include "arithmetic.h"

#include <algorithm>
#include <array>

namespace nibble {
namespace {

struct NamedScale {
  const char* name;
  ActScale scale;
};
constexpr std::array kScales = {NamedScale{"row", ActScale::kRow}, NamedScale{"static", ActScale::kStatic},
                                NamedScale{"unit", ActScale::kUnit}};

}  // namespace

Result<ExpertArithmetic> arithmetic_of(const ModelOptions& options) {
  ExpertArithmetic arithmetic{.w4a4 = options.moe_arith == "w4a4"};
  if (options.act_scale.empty()) return arithmetic;
  if (!arithmetic.w4a4) {
    return user_error("--act-scale {} is of w4a4; wanted --moe-arith w4a4 with it", options.act_scale);
  }
  const auto* named =
      std::ranges::find_if(kScales, [&](const NamedScale& s) { return s.name == options.act_scale; });
  NIBBLE_CHECK(named != kScales.end());  // the command line knows the names
  arithmetic.act_scale = named->scale;
  return arithmetic;
}

std::string describe(const ExpertArithmetic& arithmetic) {
  if (!arithmetic.w4a4) return "w4a16";
  const auto* named =
      std::ranges::find_if(kScales, [&](const NamedScale& s) { return s.scale == arithmetic.act_scale; });
  return std::string("w4a4, scale ") + named->name;
}

}  // namespace nibble
