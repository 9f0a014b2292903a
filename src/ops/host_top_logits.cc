// Default body of top_logits.
#include <algorithm>
#include <cmath>
#include <vector>

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
  std::vector<TokenLogit> all(static_cast<size_t>(logits_TV.cols));
  for (int64_t t = 0; t < out.rows; ++t) {
    const float* logits = logits_TV.row(t);
    for (size_t id = 0; id < all.size(); ++id) all[id] = {logits[id], static_cast<int32_t>(id)};
    std::partial_sort_copy(all.begin(), all.end(), out.row(t), out.row(t) + out.cols, comes_before);
  }
}

}  // namespace nibble
