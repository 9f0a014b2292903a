// A fixed set of threads for data-parallel loops. The caller's thread works too.
//
// Determinism: parallel_for says which index a task has, never which thread; a kernel whose result for an
// index depends on that index alone gives the same bits for any number of threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace nibble {

// The number of CPUs that this process may use: affinity mask and cgroup v2/v1 quota respected; at least 1.
int usable_cpus();

class ThreadPool {
 public:
  // `threads` counts the caller; REQUIRES threads >= 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(i) for every i in [0, count), each once, and returns when all are done. Indices are handed
  // out one by one, so make a task worth some microseconds. One parallel_for at a time; not reentrant.
  void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

 private:
  void work();

  struct Loop;  // the loop that runs now
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Loop* loop_ = nullptr;  // guarded by mutex_
  uint64_t epoch_ = 0;    // guarded by mutex_; a new value is a new loop
  int busy_workers_ = 0;  // guarded by mutex_
  bool stop_ = false;     // guarded by mutex_
};

}  // namespace nibble
