#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
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
  // Two threads spin where there are two CPUs; more than there are CPUs do not.
  for (int threads : {2, 3, usable_cpus() + 1}) {
    ThreadPool pool(threads);
    std::atomic<int64_t> sum = 0;
    for (int loop = 0; loop < 20000; ++loop) pool.parallel_for(4, [&](int64_t i) { sum += i; });
    EXPECT_EQ(sum.load(), 20000 * 6);
  }
}

// Workers that gave up spinning are asleep, or about to be, when the next loop comes.
TEST(ThreadPool, LoopsAboutAsFarApartAsWorkersSpin) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum = 0;
  for (int loop = 0; loop < 500; ++loop) {
    pool.parallel_for(4, [&](int64_t i) { sum += i; });
    std::this_thread::sleep_for(std::chrono::microseconds(loop % 2 * ThreadPool::kSpin_us));
  }
  EXPECT_EQ(sum.load(), 500 * 6);
}

TEST(ThreadPool, ThisMachineHasACpu) { EXPECT_GE(usable_cpus(), 1); }

}  // namespace
}  // namespace nibble
