#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace nibble {
namespace {

TEST(ThreadPool, EveryIndexOnceForAnyThreadCount) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t count : {0, 1, 2, 5, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
      pool.parallel_for(count, [&](int64_t i) { calls[static_cast<size_t>(i)]++; });
      for (const auto& c : calls) EXPECT_EQ(c.load(), 1);
    }
  }
}

TEST(ThreadPool, ManyShortLoopsInARow) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum = 0;
  for (int loop = 0; loop < 20000; ++loop) pool.parallel_for(4, [&](int64_t i) { sum += i; });
  EXPECT_EQ(sum.load(), 20000 * 6);
}

TEST(ThreadPool, ThisMachineHasACpu) { EXPECT_GE(usable_cpus(), 1); }

}  // namespace
}  // namespace nibble
