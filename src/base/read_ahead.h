// Brings mapped files into memory ahead of who reads them: a reader that meets each page as it comes waits
// for the disk alone, one request after the other.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace nibble {

class ReadAhead {
 public:
  // What lies in `mappings` (page-aligned, and mapped as long as this lives) will be read in this order. No
  // more than `window_bytes` are brought in before they are needed. With as many of the threads as the system
  // lets start.
  ReadAhead(std::vector<std::span<const std::byte>> mappings, int64_t window_bytes, int threads = 8);
  ~ReadAhead();  // without waiting for what is left
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // So many bytes, from the beginning, have been read.
  void advance(int64_t bytes);
  // So many are in memory or on their way.
  int64_t begun_bytes() const;

 private:
  void work();

  const std::vector<std::span<const std::byte>> mappings_;
  const int64_t window_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t mapping_ = 0, offset_ = 0;  // of the next piece
  int64_t begun_bytes_ = 0, read_bytes_ = 0;
  bool stops_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nibble
