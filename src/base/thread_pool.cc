#include "base/thread_pool.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <system_error>

#include "base/check.h"
#include "base/log.h"

namespace nibble {
namespace {

// cpu.max of cgroup v2 is "quota period" or "max period"; v1 has the two numbers in two files.
double cgroup_cpu_quota(const std::string& root) {
  std::string quota;
  double period = 0;
  if (std::ifstream v2(root + "/sys/fs/cgroup/cpu.max");
      v2 >> quota >> period && quota != "max" && period > 0) {
    return std::atof(quota.c_str()) / period;
  }
  double quota_us = 0;
  std::ifstream v1_quota(root + "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
      v1_period(root + "/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (v1_quota >> quota_us && v1_period >> period && quota_us > 0 && period > 0) return quota_us / period;
  return 0;
}

int within_quota(int cpus, const std::string& root) {
  if (double quota = cgroup_cpu_quota(root); quota > 0)
    cpus = std::min(cpus, static_cast<int>(std::lround(quota)));
  return std::max(cpus, 1);
}

// Tells the core that this is a waiting loop.
void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

std::vector<int> affinity_mask() {
  std::vector<int> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool known = ::sched_getaffinity(0, sizeof(set), &set) == 0;
  const int count = known ? CPU_SETSIZE : static_cast<int>(std::thread::hardware_concurrency());
  for (int cpu = 0; cpu < count; ++cpu) {
    if (!known || CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

int usable_cpus() { return within_quota(static_cast<int>(affinity_mask().size()), ""); }

int usable_cores() { return usable_cores(affinity_mask(), ""); }

int usable_cores(std::span<const int> cpus, const std::string& root) {
  std::set<std::string> cores;  // by their lists of threads
  for (int cpu : cpus) {
    std::ifstream file(
        fmt::format("{}/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", root, cpu));
    std::string threads;
    cores.insert(file >> threads ? threads : fmt::format("cpu{}", cpu));
  }
  return within_quota(static_cast<int>(cores.size()), root);
}

struct ThreadPool::Loop {
  int64_t count;
  Task task;
  std::atomic<int64_t> next{0};

  void run() {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task.call(task.body, i);
  }
};

ThreadPool::ThreadPool(int threads) : spins_(threads <= usable_cpus()) {
  NIBBLE_CHECK(threads >= 1);
  for (int i = 1; i < threads; ++i) {
    try {
      workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // A container's limit, say. Fewer threads give the same bits, only later.
      log_warning("only {} of {} threads could be started", i, threads);
      break;
    }
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

template <class Ready>
void ThreadPool::spin_until(const Ready& ready) const {
  if (!spins_) return;
  constexpr int kLooksPerClock = 32;  // reading the clock costs about as much as so many looks are worth
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(kSpin_us);
  while (true) {
    for (int i = 0; i < kLooksPerClock; ++i) {
      if (ready()) return;
      relax_cpu();
    }
    if (std::chrono::steady_clock::now() >= end) return;
  }
}

void ThreadPool::run(int64_t count, Task task) {
  Loop loop{count, task};
  bool someone_sleeps = false;
  {
    std::lock_guard lock(mutex_);
    NIBBLE_CHECK(loop_ == nullptr);
    loop_ = &loop;
    ++epoch_;
    someone_sleeps = sleepers_ > 0;
  }
  if (someone_sleeps) wake_.notify_all();
  loop.run();
  // All indices are taken; wait for the workers that still hold one. Late wakers find loop_ null.
  spin_until([this] { return busy_workers_.load(std::memory_order_relaxed) == 0; });
  std::unique_lock lock(mutex_);
  loop_ = nullptr;
  done_.wait(lock, [this] { return busy_workers_ == 0; });
}

void ThreadPool::work() {
  uint64_t seen = 0;
  while (true) {
    spin_until([&] {
      return epoch_.load(std::memory_order_relaxed) != seen || stop_.load(std::memory_order_relaxed);
    });
    std::unique_lock lock(mutex_);
    if (!stop_ && loop_ == nullptr && epoch_ != seen) {  // too late for that one; the next may be near
      seen = epoch_;
      continue;
    }
    ++sleepers_;
    wake_.wait(lock, [&] { return stop_ || (loop_ != nullptr && epoch_ != seen); });
    --sleepers_;
    if (stop_) return;
    seen = epoch_;
    Loop* loop = loop_;
    ++busy_workers_;
    lock.unlock();
    loop->run();
    lock.lock();
    if (--busy_workers_ == 0) done_.notify_one();
  }
}

}  // namespace nibble
