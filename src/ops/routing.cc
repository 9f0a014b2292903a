#include "ops/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace nibble {
namespace {

float score(const RouterSpec& spec, float logit) {
  if (spec.logit_softcap > 0) logit = spec.logit_softcap * std::tanh(logit / spec.logit_softcap);
  switch (spec.score) {
    case RouterScore::kSigmoid:
      return 1.0f / (1.0f + std::exp(-logit));
    case RouterScore::kSqrtSoftplus:
      return std::sqrt(logit > 20 ? logit : std::log1p(std::exp(logit)));
  }
  NIBBLE_CHECK(false);
}

}  // namespace

void route_on_host(const RouteArgs& args) {
  const size_t experts = static_cast<size_t>(args.logits.cols), chosen = static_cast<size_t>(args.ids.cols);
  std::vector<float> scores(experts), keys(experts);
  std::vector<int32_t> order(experts);
  for (int64_t t = 0; t < args.logits.rows; ++t) {
    for (size_t e = 0; e < experts; ++e) {
      scores[e] = score(args.spec, args.logits.row(t)[e]);
      float key = scores[e] + (args.bias_E != nullptr ? args.bias_E[e] : 0.0f);
      // A NaN (from a broken checkpoint) would break the sort's order; it is never chosen before a number.
      keys[e] = std::isnan(key) ? -INFINITY : key;
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(chosen), order.end(),
                      [&](int32_t a, int32_t b) {
                        float ka = keys[static_cast<size_t>(a)], kb = keys[static_cast<size_t>(b)];
                        return ka != kb ? ka > kb : a < b;
                      });
    float sum = args.spec.renormalize_epsilon;
    for (size_t a = 0; a < chosen; ++a) sum += scores[static_cast<size_t>(order[a])];
    for (size_t a = 0; a < chosen; ++a) {
      float weight = scores[static_cast<size_t>(order[a])];
      if (args.spec.renormalize) weight /= sum;
      args.ids.row(t)[a] = order[a];
      args.weights.row(t)[a] = weight * args.spec.scale;
    }
  }
}

}  // namespace nibble
