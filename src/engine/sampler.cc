#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/check.h"

namespace nibble {
namespace {

template <class T>
Status in_range(const char* name, T value, T low, T high) {
  if (value >= low && value <= high) return {};  // false for NaN
  return user_error("{}: wanted a value in [{}, {}], found {}", name, low, high, value);
}

bool has_penalties(const SamplingParams& p) {
  return p.repeat_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}

}  // namespace

Status SamplingParams::check() const {
  NIBBLE_RETURN_IF_ERROR(in_range("temperature", temperature, 0.0f, 100.0f));
  NIBBLE_RETURN_IF_ERROR(in_range("top_k", top_k, 0, INT32_MAX));
  NIBBLE_RETURN_IF_ERROR(in_range("top_p", top_p, 0.0f, 1.0f));
  NIBBLE_RETURN_IF_ERROR(in_range("min_p", min_p, 0.0f, 1.0f));
  NIBBLE_RETURN_IF_ERROR(in_range("repeat_penalty", repeat_penalty, 0.01f, 100.0f));
  NIBBLE_RETURN_IF_ERROR(in_range("presence_penalty", presence_penalty, -100.0f, 100.0f));
  NIBBLE_RETURN_IF_ERROR(in_range("frequency_penalty", frequency_penalty, -100.0f, 100.0f));
  return in_range("penalty_last_n", penalty_last_n, -1, INT32_MAX);
}

Sampler::Sampler(const SamplingParams& params) : params_(params) { NIBBLE_CHECK(params.check().ok()); }

bool Sampler::needs_top_only() const {
  const SamplingParams& p = params_;
  return !has_penalties(p) && (p.temperature == 0 || (p.top_k > 0 && p.top_k <= kTopLogits));
}

int32_t Sampler::sample_top(std::span<const TokenLogit> top) {
  NIBBLE_CHECK(needs_top_only() && !top.empty());
  if (params_.temperature == 0) return top[0].id;
  candidates_.assign(top.begin(), top.end());
  sorted_ = candidates_.size();
  return draw();
}

int32_t Sampler::sample(std::span<const float> logits, std::span<const int32_t> history) {
  candidates_.clear();
  for (size_t id = 0; id < logits.size(); ++id) {
    // A NaN would break every order below; it stands for "never".
    float logit = std::isnan(logits[id]) ? -INFINITY : logits[id];
    candidates_.push_back({logit, static_cast<int32_t>(id)});
  }
  apply_penalties(history);
  if (params_.temperature == 0) {
    // The lowest id wins a tie: candidates are still in the order of ids.
    return std::max_element(candidates_.begin(), candidates_.end(),
                            [](const TokenLogit& a, const TokenLogit& b) { return a.logit < b.logit; })
        ->id;
  }
  sorted_ = 0;
  return draw();
}

int32_t Sampler::draw() {
  const double top = std::ranges::max(candidates_, {}, &TokenLogit::logit).logit;
  keep_top_k();
  keep_top_p_and_min_p(top);

  auto probability = [&](const TokenLogit& c) { return std::exp((c.logit - top) / params_.temperature); };
  double sum = 0;
  for (const TokenLogit& c : candidates_) sum += probability(c);
  double left = uniform() * sum;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    left -= probability(ranked(i));
    if (left < 0) return ranked(i).id;
  }
  return candidates_.back().id;  // rounding ate the last of `left`
}

void Sampler::apply_penalties(std::span<const int32_t> history) {
  const SamplingParams& p = params_;
  if (!has_penalties(p)) return;
  if (p.penalty_last_n >= 0 && history.size() > static_cast<size_t>(p.penalty_last_n)) {
    history = history.last(static_cast<size_t>(p.penalty_last_n));
  }
  std::unordered_map<int32_t, int32_t> counts;
  for (int32_t id : history) ++counts[id];
  for (const auto& [id, count] : counts) {
    if (id < 0 || static_cast<size_t>(id) >= candidates_.size()) continue;
    float& logit = candidates_[static_cast<size_t>(id)].logit;
    logit = logit > 0 ? logit / p.repeat_penalty : logit * p.repeat_penalty;
    logit -= p.presence_penalty + p.frequency_penalty * static_cast<float>(count);
  }
}

const TokenLogit& Sampler::ranked(size_t i) {
  if (i >= sorted_) {
    constexpr size_t kFirst = 64, kGrowth = 4;
    const size_t end = std::min(candidates_.size(), std::max({kFirst, sorted_ * kGrowth, i + 1}));
    auto before = [](const TokenLogit& a, const TokenLogit& b) {
      return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    const auto from = candidates_.begin() + static_cast<int64_t>(sorted_);
    const auto to = candidates_.begin() + static_cast<int64_t>(end);
    // Nearly all of many candidates fail their only comparison with the worst of a few.
    constexpr size_t kFew = 256;
    if (end - sorted_ <= kFew) {
      std::partial_sort(from, to, candidates_.end(), before);
    } else {
      std::nth_element(from, to, candidates_.end(), before);
      std::sort(from, to, before);
    }
    sorted_ = end;
  }
  return candidates_[i];
}

void Sampler::keep_top_k() {
  const auto keep = static_cast<size_t>(params_.top_k);
  if (keep == 0 || keep >= candidates_.size()) return;
  ranked(keep - 1);
  candidates_.resize(keep);
  sorted_ = keep;
}

void Sampler::keep_top_p_and_min_p(double top) {
  size_t keep = candidates_.size();
  if (params_.top_p < 1) {
    double sum = 0, mass = 0;
    for (const TokenLogit& c : candidates_) sum += std::exp(c.logit - top);
    for (keep = 0; keep < candidates_.size() && (keep == 0 || mass < params_.top_p * sum); ++keep) {
      mass += std::exp(ranked(keep).logit - top);
    }
  }
  if (params_.min_p > 0) {
    const double lowest = top + std::log(params_.min_p);
    size_t likely = 1;
    while (likely < keep && ranked(likely).logit >= lowest) ++likely;
    keep = likely;
  }
  if (keep == candidates_.size()) return;
  ranked(keep - 1);
  candidates_.resize(keep);
  sorted_ = std::min(sorted_, keep);
}

double Sampler::uniform() {
  // splitmix64 of (seed, n): Steele, Lea, Flood 2014.
  uint64_t z = params_.seed + (++draws_) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

}  // namespace nibble
