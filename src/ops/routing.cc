#include "ops/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace nibble {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float sqrt_softplus(float x) { return std::sqrt(x > 20 ? x : std::log1p(std::exp(x))); }

// exp(x - max) / sum, in place; added in the order of the elements.
void softmax(std::vector<float>& x) {
  const float top = *std::max_element(x.begin(), x.end());
  float sum = 0;
  for (float& value : x) sum += value = std::exp(value - top);
  for (float& value : x) value /= sum;
}

// What one row needs, kept from row to row.
class Router {
 public:
  explicit Router(const RouteArgs& args)
      : args_(args),
        scores_(static_cast<size_t>(args.logits.cols)),
        keys_(scores_.size()),
        candidates_(scores_.size()),
        weights_(static_cast<size_t>(args.ids.cols)) {}

  void route_row(int64_t t) {
    score(args_.logits.row(t));
    choose_groups();
    const int64_t chosen = args_.ids.cols;
    std::partial_sort(candidates_.begin(), candidates_.begin() + chosen, candidates_.end(),
                      [&](int32_t a, int32_t b) { return is_better(keys_, a, b); });
    std::copy_n(candidates_.begin(), chosen, args_.ids.row(t));
    weigh();
    for (size_t a = 0; a < weights_.size(); ++a) args_.weights.row(t)[a] = weights_[a] * args_.spec.scale;
  }

 private:
  static bool is_better(const std::vector<float>& keys, int32_t a, int32_t b) {
    const float ka = keys[static_cast<size_t>(a)], kb = keys[static_cast<size_t>(b)];
    return ka != kb ? ka > kb : a < b;
  }

  // scores_ (what weighs) and keys_ (what chooses) of all experts.
  void score(const float* logits) {
    const RouterSpec& spec = args_.spec;
    const bool softens = spec.logit_softcap > 0;
    for (size_t e = 0; e < scores_.size(); ++e) {
      scores_[e] = softens ? spec.logit_softcap * std::tanh(logits[e] / spec.logit_softcap) : logits[e];
    }
    switch (spec.score) {
      case RouterScore::kSigmoid:
        std::transform(scores_.begin(), scores_.end(), scores_.begin(), sigmoid);
        break;
      case RouterScore::kSqrtSoftplus:
        std::transform(scores_.begin(), scores_.end(), scores_.begin(), sqrt_softplus);
        break;
      case RouterScore::kSoftmaxAll:
        softmax(scores_);
        break;
      case RouterScore::kSoftmaxChosen:  // later, over the chosen
        break;
    }
    for (size_t e = 0; e < scores_.size(); ++e) {
      const float key = scores_[e] + (args_.bias_E != nullptr ? args_.bias_E[e] : 0.0f);
      // A NaN (from a broken checkpoint) would break the sort's order; it is never chosen before a number.
      keys_[e] = std::isnan(key) ? -INFINITY : key;
    }
  }

  // candidates_: the experts of the groups that stay.
  void choose_groups() {
    candidates_.resize(scores_.size());
    std::iota(candidates_.begin(), candidates_.end(), 0);
    const int64_t groups = args_.spec.n_group, kept = args_.spec.topk_group;
    if (kept == groups) return;
    const int64_t size = args_.logits.cols / groups;
    std::vector<float> sums(static_cast<size_t>(groups));
    for (int64_t g = 0; g < groups; ++g) {
      float best = -INFINITY, second = -INFINITY;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        const float key = keys_[static_cast<size_t>(e)];
        second = std::max(second, std::min(best, key));
        best = std::max(best, key);
      }
      const float sum = size > 1 ? best + second : best;
      sums[static_cast<size_t>(g)] = std::isnan(sum) ? -INFINITY : sum;
    }
    std::vector<int32_t> order(sums.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + kept, order.end(),
                      [&](int32_t a, int32_t b) { return is_better(sums, a, b); });
    candidates_.clear();
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t first = order[static_cast<size_t>(i)] * size;
      for (int64_t e = first; e < first + size; ++e) candidates_.push_back(static_cast<int32_t>(e));
    }
  }

  // weights_ of the first of candidates_, without the factor.
  void weigh() {
    const RouterSpec& spec = args_.spec;
    for (size_t a = 0; a < weights_.size(); ++a) weights_[a] = scores_[static_cast<size_t>(candidates_[a])];
    if (spec.score == RouterScore::kSoftmaxChosen) return softmax(weights_);
    if (!spec.renormalize) return;
    const float sum = std::accumulate(weights_.begin(), weights_.end(), spec.renormalize_epsilon);
    for (float& weight : weights_) weight /= sum;
  }

  const RouteArgs& args_;
  std::vector<float> scores_, keys_;  // [E]
  std::vector<int32_t> candidates_;
  std::vector<float> weights_;  // [A]
};

}  // namespace

void route_on_host(const RouteArgs& args) {
  Router router(args);
  for (int64_t t = 0; t < args.logits.rows; ++t) router.route_row(t);
}

}  // namespace nibble
