#include "kv/kv_cache.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "gpu.h"

namespace nibble {
namespace {

const std::vector<KvLayerShape> kLayers = {{2, 32, 0, 0}, {2, 32, 0, 24}, {1, 16, 0, 24}, {2, 32, 16, 0}};
const std::vector<int64_t> kStates = {12, 40};

TEST(PagePool, TakesEachPageOnce) {
  PagePool pool(5);
  std::set<int32_t> taken;
  while (pool.free_pages() > 0) taken.insert(pool.take());
  EXPECT_EQ(taken, (std::set<int32_t>{0, 1, 2, 3, 4}));
  pool.give_back(3);
  pool.check_integrity();
  EXPECT_EQ(pool.take(), 3);
}

TEST(PagePoolDeath, GivingBackTwiceIsABug) {
  PagePool pool(2);
  int32_t page = pool.take();
  pool.give_back(page);
  EXPECT_DEATH(pool.give_back(page), "check failed");
}

class KvCacheOn : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Ops> ops_ = make_backend(GetParam(), {}).value();
};

TEST_P(KvCacheOn, AFullExtensionFailsWhole) {
  auto cache = KvCache::create(
      ops_->memory(), kLayers, kStates,
      {.max_sequences = 2, .max_tokens = 64, .pool_tokens = 96, .max_new_tokens = 64, .page_tokens = 16});
  ASSERT_TRUE(cache.ok());
  int32_t a = cache->add_sequence().value(), b = cache->add_sequence().value();
  EXPECT_FALSE(cache->add_sequence().ok());
  std::vector<KvCache::Extension> both = {{a, 64}, {b, 33}};  // 4 + 3 pages of 6
  Status status = cache->extend(both);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("7 more pages"), std::string::npos) << status.message();
  EXPECT_EQ(cache->length(a), 0);
  EXPECT_EQ(cache->free_tokens(), 96);
  cache->check_integrity();
  both[1].new_tokens = 32;
  EXPECT_TRUE(cache->extend(both).ok());
  EXPECT_EQ(cache->free_tokens(), 0);
  EXPECT_FALSE(cache->extend(std::vector<KvCache::Extension>{{a, 1}}).ok());  // context
  cache->remove_sequence(a);
  EXPECT_EQ(cache->free_tokens(), 64);
  cache->check_integrity();
}

TEST(KvCacheDeath, ASequenceNamedTwiceIsABug) {
  auto cache = KvCache::create(host_memory(), kLayers, kStates, {.max_sequences = 2, .max_tokens = 64});
  ASSERT_TRUE(cache.ok());
  const int32_t a = cache->add_sequence().value(), b = cache->add_sequence().value();
  const std::vector<KvCache::Extension> twice = {{a, 1}, {b, 1}, {a, 1}};
  EXPECT_DEATH((void)cache->extend(twice), "check failed");
}

// The positions that a step can see or write lie in different places, wherever the step starts.
TEST_P(KvCacheOn, ARingNeverMeetsItself) {
  for (int64_t page : {1, 4, 16, 64}) {
    for (int64_t chunk : {1, 7, 16, 40}) {
      auto cache = KvCache::create(
          ops_->memory(), kLayers, kStates,
          {.max_sequences = 1, .max_tokens = 500, .max_new_tokens = chunk, .page_tokens = page});
      ASSERT_TRUE(cache.ok());
      int32_t slot = cache->add_sequence().value();
      for (int64_t length = 0; length + chunk <= 500; length += chunk) {
        ASSERT_TRUE(cache->extend(std::vector<KvCache::Extension>{{slot, chunk}}).ok());
        KvView view = cache->view(1);
        std::vector<int32_t> table(static_cast<size_t>(view.table_pages));
        ops_->memory().download(table.data(), view.table,
                                view.table_pages * static_cast<int64_t>(sizeof(int32_t)));
        std::set<int64_t> places;
        int64_t first = std::max<int64_t>(0, length - 23), last = length + chunk - 1;
        for (int64_t p = first; p <= last; ++p) {
          places.insert(table[static_cast<size_t>((p / page) % view.table_pages)] * page + p % page);
        }
        ASSERT_EQ(static_cast<int64_t>(places.size()), last - first + 1)
            << "page " << page << ", chunk " << chunk;
      }
      cache->check_integrity();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Memories, KvCacheOn, testing::ValuesIn(with_gpu({"reference"})),
                         [](const auto& info) { return info.param; });

TEST(KvCache, RandomLifeKeepsItsBooks) {
  std::mt19937 random(7);
  auto cache = KvCache::create(
      host_memory(), kLayers, kStates,
      {.max_sequences = 5, .max_tokens = 200, .pool_tokens = 400, .max_new_tokens = 50, .page_tokens = 8});
  ASSERT_TRUE(cache.ok());
  std::vector<int32_t> slots;
  for (int i = 0; i < 5000; ++i) {
    int action = static_cast<int>(random() % 10);
    if (action == 0) {
      auto slot = cache->add_sequence();
      EXPECT_EQ(slot.ok(), slots.size() < 5);
      if (slot.ok()) slots.push_back(*slot);
    } else if (action == 1 && !slots.empty()) {
      size_t who = random() % slots.size();
      cache->remove_sequence(slots[who]);
      slots.erase(slots.begin() + static_cast<int64_t>(who));
    } else if (!slots.empty()) {
      std::vector<KvCache::Extension> extensions;
      for (int32_t slot : slots) {
        if (random() % 2 == 0) extensions.push_back({slot, static_cast<int64_t>(random() % 51)});
      }
      std::vector<int64_t> before;
      for (auto& e : extensions) before.push_back(cache->length(e.slot));
      bool ok = cache->extend(extensions).ok();
      for (size_t e = 0; e < extensions.size(); ++e) {
        EXPECT_EQ(cache->length(extensions[e].slot), before[e] + (ok ? extensions[e].new_tokens : 0));
      }
    }
    cache->check_integrity();
  }
}

TEST(KvCache, SizesThatCannotBeAreRefused) {
  for (KvOptions options :
       {KvOptions{.max_sequences = 0}, KvOptions{.max_tokens = -1}, KvOptions{.page_tokens = 0},
        KvOptions{.max_sequences = INT64_MAX, .max_tokens = INT64_MAX},
        KvOptions{.max_sequences = 1 << 20, .max_tokens = 1 << 20}}) {
    auto plan = KvCache::plan_bytes(kLayers, kStates, options);
    EXPECT_FALSE(plan.ok());
    EXPECT_EQ(plan.status().code(), ErrorCode::kUser);
  }
  auto plan = KvCache::plan_bytes({{INT64_C(1) << 40, INT64_C(1) << 40}}, {}, {});
  EXPECT_FALSE(plan.ok());
}

}  // namespace
}  // namespace nibble
