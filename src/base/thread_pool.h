// A fixed set of threads for data-parallel loops. The caller's thread works too.
//
// Determinism: parallel_for says which index a task has, never which thread; a kernel whose result for an
// index depends on that index alone gives the same bits for any number of threads.
//
// Waiting: loops come in bursts, some microseconds apart, and waking a sleeping thread costs more than such a
// gap. So workers that found nothing to do, and a caller that waits for them, look again for kSpin_us before
// they sleep; not where the pool has more threads than there are CPUs, since one would spin in another's way.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace nibble {

// The CPUs of the process's affinity mask; all where it is not known.
std::vector<int> affinity_mask();
// The number of CPUs that this process may use: affinity mask and cgroup v2/v1 quota respected; at least 1.
int usable_cpus();
// The same, but of CPUs that are threads of one core only one counts: a core's threads share what multiplies.
// A CPU of which the kernel does not say whose thread it is counts as a core.
int usable_cores();
// That of an affinity mask with these CPUs. `root` stands before the paths of the kernel's files.
int usable_cores(std::span<const int> cpus, const std::string& root);

class ThreadPool {
 public:
  static constexpr int kSpin_us = 50;

  // `threads` counts the caller; REQUIRES threads >= 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(i) for every i in [0, count), each once, and returns when all are done. Indices are handed
  // out one by one, so make a task worth some microseconds. One parallel_for at a time; not reentrant.
  template <class Body>
  void parallel_for(int64_t count, const Body& body) {
    if (count <= 0) return;
    if (count == 1 || workers_.empty()) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run(count, {&body, [](const void* of, int64_t i) { (*static_cast<const Body*>(of))(i); }});
  }

 private:
  // A caller's lambda without a copy of it, which might allocate.
  struct Task {
    const void* body;
    void (*call)(const void* body, int64_t i);
  };
  void run(int64_t count, Task task);
  void work();
  // Looks at `ready` for up to kSpin_us; at once where this pool does not spin.
  template <class Ready>
  void spin_until(const Ready& ready) const;

  struct Loop;  // the loop that runs now
  const bool spins_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Loop* loop_ = nullptr;  // guarded by mutex_
  int sleepers_ = 0;      // guarded by mutex_; workers in wake_
  // Written under mutex_; read without it only to decide whether to go on spinning.
  std::atomic<uint64_t> epoch_ = 0;    // a new value is a new loop
  std::atomic<int> busy_workers_ = 0;  // inside a loop
  std::atomic<bool> stop_ = false;
};

}  // namespace nibble
