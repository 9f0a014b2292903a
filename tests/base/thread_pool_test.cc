#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "fake_root.h"

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

class UsableCores : public testing::WithFakeRoot {
 protected:
  void write_threads(int cpu, const std::string& threads) const {
    write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
          threads + "\n");
  }
  int cores(std::initializer_list<int> cpus) const { return usable_cores({cpus.begin(), cpus.end()}, root_); }
};

// As Intel and AMD number them, and as others do.
TEST_F(UsableCores, ThreadsOfACoreCountOnce) {
  for (int cpu = 0; cpu < 8; ++cpu)
    write_threads(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  EXPECT_EQ(cores({0, 1, 2, 3, 4, 5, 6, 7}), 4);
  EXPECT_EQ(cores({1, 2, 5}), 2);
  EXPECT_EQ(cores({5}), 1);
  for (int cpu = 0; cpu < 8; ++cpu) {
    const int first = cpu / 2 * 2;
    write_threads(cpu, std::to_string(first) + "-" + std::to_string(first + 1));
  }
  EXPECT_EQ(cores({0, 1, 2, 3, 4}), 3);
}

TEST_F(UsableCores, WithoutTheKernelsWordEveryCpuCounts) {
  EXPECT_EQ(cores({0, 1, 17}), 3);
  EXPECT_EQ(cores({}), 1);
  write_threads(0, "0-1");
  write_threads(1, "");
  EXPECT_EQ(cores({0, 1, 2}), 3);
}

TEST_F(UsableCores, WithinTheQuotaOfACgroup) {
  for (int cpu = 0; cpu < 8; ++cpu) write_threads(cpu, std::to_string(cpu));
  write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cores({0, 1, 2, 3}), 4);
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000\n");
  EXPECT_EQ(cores({0, 1, 2, 3}), 3);
  write("/sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(cores({0, 1, 2, 3}), 3);
  write("/sys/fs/cgroup/cpu.max", "150000 100000\n");
  EXPECT_EQ(cores({0, 1, 2, 3}), 2);
  write("/sys/fs/cgroup/cpu.max", "20000 100000\n");
  EXPECT_EQ(cores({0, 1, 2, 3}), 1);
}

TEST(ThreadPool, ThisMachineHasACpu) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_GE(usable_cpus(), usable_cores());
}

}  // namespace
}  // namespace nibble
