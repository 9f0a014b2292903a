#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

namespace nibble {
namespace {

// Everything off but what a test turns on.
SamplingParams plain(float temperature) {
  return {.temperature = temperature, .top_k = 0, .top_p = 1, .min_p = 0};
}

std::set<int32_t> seen(const SamplingParams& params, const std::vector<float>& logits,
                       const std::vector<int32_t>& history = {}) {
  std::set<int32_t> ids;
  Sampler sampler(params);
  for (int i = 0; i < 3000; ++i) ids.insert(sampler.sample(logits, history));
  return ids;
}

TEST(Sampler, GreedyTakesTheLowestOfEquals) {
  Sampler sampler(plain(0));
  EXPECT_EQ(sampler.sample(std::vector<float>{1, 3, 3, 2}, {}), 1);
  EXPECT_EQ(sampler.sample(std::vector<float>{-5, -INFINITY, -4}, {}), 2);
  EXPECT_EQ(sampler.sample(std::vector<float>{NAN, 1, NAN}, {}), 1);
  EXPECT_EQ(sampler.sample(std::vector<float>{-INFINITY, -INFINITY}, {}), 0);
}

// What is left of logits by Ops::top_logits.
std::vector<TokenLogit> top_of(const std::vector<float>& logits) {
  std::vector<TokenLogit> all;
  for (float logit : logits) all.push_back({logit, static_cast<int32_t>(all.size())});
  std::ranges::stable_sort(all, [](const TokenLogit& a, const TokenLogit& b) { return a.logit > b.logit; });
  all.resize(std::min(all.size(), static_cast<size_t>(kTopLogits)));
  return all;
}

TEST(Sampler, TheTopAloneGivesTheSameTokens) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 3);
  for (size_t vocab : {1, 3, 64, 5000}) {
    std::vector<float> logits(vocab);
    for (float& logit : logits) logit = std::round(normal(random) * 4) / 4;  // some are equal
    const std::vector<TokenLogit> top = top_of(logits);
    for (const SamplingParams& params : {plain(0),
                                         SamplingParams{},
                                         {.temperature = 0, .top_k = 0},
                                         {.temperature = 1.3f, .top_k = 64, .top_p = 1, .min_p = 0},
                                         {.temperature = 2, .top_k = 1},
                                         {.temperature = 0.7f, .top_k = 20, .top_p = 0.6f, .min_p = 0.1f}}) {
      Sampler of_all(params), of_top(params);
      ASSERT_TRUE(of_top.needs_top_only());
      for (int i = 0; i < 200; ++i) ASSERT_EQ(of_all.sample(logits, {}), of_top.sample_top(top));
    }
  }
}

TEST(Sampler, WhatNeedsEveryLogit) {
  EXPECT_FALSE(Sampler({.top_k = 0}).needs_top_only());
  EXPECT_FALSE(Sampler({.top_k = 65}).needs_top_only());
  EXPECT_FALSE(Sampler({.repeat_penalty = 1.1f}).needs_top_only());
  EXPECT_FALSE(Sampler({.temperature = 0, .presence_penalty = 0.5f}).needs_top_only());
  EXPECT_FALSE(Sampler({.frequency_penalty = -0.5f}).needs_top_only());
}

TEST(Sampler, DrawsFollowTheProbabilities) {
  Sampler sampler(plain(1));
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  std::map<int32_t, int> counts;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.sample(logits, {})];
  // Five standard deviations of a binomial.
  EXPECT_NEAR(counts[0], 0.5 * kDraws, 5 * std::sqrt(0.25 * kDraws));
  EXPECT_NEAR(counts[1], 0.3 * kDraws, 5 * std::sqrt(0.21 * kDraws));
  EXPECT_NEAR(counts[2], 0.2 * kDraws, 5 * std::sqrt(0.16 * kDraws));
}

TEST(Sampler, Filters) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.3f), std::log(0.2f)};
  SamplingParams params = plain(1);
  params.top_k = 2;
  EXPECT_EQ(seen(params, logits), (std::set<int32_t>{1, 2}));
  params = plain(1);
  params.top_p = 0.65f;  // 0.4 is not enough, 0.7 is
  EXPECT_EQ(seen(params, logits), (std::set<int32_t>{1, 2}));
  params.top_p = 0;  // the best always stays
  EXPECT_EQ(seen(params, logits), (std::set<int32_t>{1}));
  params = plain(1);
  params.min_p = 0.45f;  // of 0.4: 0.18
  EXPECT_EQ(seen(params, logits), (std::set<int32_t>{1, 2, 3}));
  params.min_p = 1;
  EXPECT_EQ(seen(params, logits), (std::set<int32_t>{1}));
  EXPECT_EQ(seen(plain(1), logits), (std::set<int32_t>{0, 1, 2, 3}));
}

// Candidates are sorted as far as a draw needs: a large vocabulary in any order gives the token of the same
// rank.
TEST(Sampler, TheOrderOfALargeVocabularyDoesNotMatter) {
  std::vector<float> ordered, shuffled;
  for (int i = 0; i < 5000; ++i) ordered.push_back(-0.002f * static_cast<float>(i));
  std::vector<size_t> place(ordered.size());
  std::iota(place.begin(), place.end(), 0);
  std::shuffle(place.begin(), place.end(), std::mt19937(5));
  for (size_t i : place) shuffled.push_back(ordered[i]);
  for (auto [top_k, top_p, min_p] :
       {std::tuple{0, 1.0f, 0.0f}, {700, 1.0f, 0.0f}, {0, 0.6f, 0.0f}, {0, 1.0f, 0.2f}}) {
    SamplingParams params = plain(1);
    params.top_k = top_k, params.top_p = top_p, params.min_p = min_p;
    Sampler a(params), b(params);
    std::set<int32_t> drawn;
    for (int draw = 0; draw < 2000; ++draw) {
      const int32_t rank = a.sample(ordered, {});
      EXPECT_EQ(place[static_cast<size_t>(b.sample(shuffled, {}))], static_cast<size_t>(rank));
      drawn.insert(rank);
    }
    // exp(-0.002 i): 0.6 of the mass lies in the first 458, 0.2 of the best in the first 805.
    const int32_t last = top_k > 0 ? 699 : top_p < 1 ? 458 : min_p > 0 ? 804 : 4999;
    EXPECT_LE(*drawn.rbegin(), last);
    EXPECT_GE(*drawn.rbegin(), last / 2);
  }
}

TEST(Sampler, Penalties) {
  const std::vector<float> logits = {2.0f, 1.9f, -1.0f};
  SamplingParams params = plain(0);
  params.repeat_penalty = 1.5f;
  EXPECT_EQ(Sampler(params).sample(logits, std::vector<int32_t>{0}), 1);
  params = plain(0);
  params.presence_penalty = 0.2f;
  EXPECT_EQ(Sampler(params).sample(logits, std::vector<int32_t>{0}), 1);
  params = plain(0);
  params.frequency_penalty = 0.06f;
  EXPECT_EQ(Sampler(params).sample(logits, std::vector<int32_t>{0}), 0);
  EXPECT_EQ(Sampler(params).sample(logits, std::vector<int32_t>{0, 0}), 1);
  params.penalty_last_n = 1;  // looks back at the last token only
  EXPECT_EQ(Sampler(params).sample(logits, std::vector<int32_t>{0, 0, 2}), 0);
  params.penalty_last_n = 0;
  EXPECT_EQ(Sampler(params).sample(logits, std::vector<int32_t>{0, 0}), 0);
  params.penalty_last_n = -1;
  EXPECT_EQ(Sampler(params).sample(logits, std::vector<int32_t>{0, 0, 2}), 1);
  // A negative logit goes down, not up.
  params = plain(0);
  params.repeat_penalty = 2;
  EXPECT_EQ(Sampler(params).sample(std::vector<float>{-1.0f, -1.5f}, std::vector<int32_t>{0}), 1);
}

TEST(Sampler, SameSeedSameDraws) {
  std::vector<float> logits(1000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = std::sin(static_cast<float>(i));
  SamplingParams params;
  params.seed = 42;
  Sampler a(params), b(params);
  params.seed = 43;
  Sampler other(params);
  int different = 0;
  for (int i = 0; i < 200; ++i) {
    int32_t token = a.sample(logits, {});
    EXPECT_EQ(token, b.sample(logits, {}));
    different += token != other.sample(logits, {});
  }
  EXPECT_GT(different, 50);
}

TEST(Sampler, ValuesOutOfRangeAreNamed) {
  auto message = [](auto change) {
    SamplingParams params;
    change(params);
    return params.check().message();
  };
  EXPECT_NE(message([](auto& p) { p.temperature = -1; }).find("temperature"), std::string::npos);
  EXPECT_NE(message([](auto& p) { p.temperature = NAN; }).find("temperature"), std::string::npos);
  EXPECT_NE(message([](auto& p) { p.top_k = -1; }).find("top_k"), std::string::npos);
  EXPECT_NE(message([](auto& p) { p.top_p = 1.5f; }).find("top_p"), std::string::npos);
  EXPECT_NE(message([](auto& p) { p.min_p = -0.1f; }).find("min_p"), std::string::npos);
  EXPECT_NE(message([](auto& p) { p.repeat_penalty = 0; }).find("repeat_penalty"), std::string::npos);
  EXPECT_TRUE(SamplingParams().check().ok());
}

}  // namespace
}  // namespace nibble
