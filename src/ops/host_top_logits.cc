// Default body of top_logits.
#include <algorithm>
#include <cmath>
#include <ranges>

#include "ops/ops.h"

namespace nibble {
namespace {

bool comes_before(const TokenLogit& a, const TokenLogit& b) {
  if (std::isnan(a.logit) != std::isnan(b.logit)) return std::isnan(a.logit);
  if (a.logit != b.logit && !std::isnan(a.logit)) return a.logit > b.logit;
  return a.id < b.id;
}

}  // namespace

void Ops::do_top_logits(Rows<const float> logits_TV, Rows<TokenLogit> out) {
  for (int64_t t = 0; t < out.rows; ++t) {
    const float* logits = logits_TV.row(t);
    const auto all = std::views::iota(int32_t{0}, static_cast<int32_t>(logits_TV.cols)) |
                     std::views::transform([&](int32_t id) {
                       return TokenLogit{logits[id], id};
                     });
    std::ranges::partial_sort_copy(all, std::span(out.row(t), static_cast<size_t>(out.cols)), comes_before);
  }
}

}  // namespace nibble
