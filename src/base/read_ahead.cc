#include "base/read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace nibble {
namespace {

// Long enough for the disk, and a reader soon gets the first ones.
constexpr size_t kPieceBytes = size_t{8} << 20;

void bring_in(std::span<const std::byte> piece) {
  auto* address = const_cast<std::byte*>(piece.data());
  // The whole piece as one request to the disk; then wait for it.
  ::madvise(address, piece.size(), MADV_WILLNEED);
#ifdef MADV_POPULATE_READ  // Linux 5.14
  if (::madvise(address, piece.size(), MADV_POPULATE_READ) == 0) return;
  if (errno != EINVAL) return;  // who needs these bytes will see what is wrong with them
#endif
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < piece.size(); at += page) {
    [[maybe_unused]] const volatile std::byte touched = piece[at];
  }
}

}  // namespace

ReadAhead::ReadAhead(std::vector<std::span<const std::byte>> mappings, int64_t window_bytes, int threads)
    : mappings_(std::move(mappings)), window_bytes_(window_bytes) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // Who reads does without some of them, or all.
  }
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ReadAhead::advance(int64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    read_bytes_ = bytes;
  }
  changed_.notify_all();
}

int64_t ReadAhead::begun_bytes() const {
  const std::lock_guard lock(mutex_);
  return begun_bytes_;
}

void ReadAhead::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (mapping_ < mappings_.size() && offset_ == mappings_[mapping_].size()) ++mapping_, offset_ = 0;
    if (stops_ || mapping_ == mappings_.size()) return;
    const std::span<const std::byte> left = mappings_[mapping_].subspan(offset_);
    const std::span<const std::byte> piece = left.first(std::min(left.size(), kPieceBytes));
    if (begun_bytes_ + std::ssize(piece) > read_bytes_ + window_bytes_) {
      changed_.wait(lock);
      continue;
    }
    offset_ += piece.size();
    begun_bytes_ += std::ssize(piece);
    lock.unlock();
    bring_in(piece);
    lock.lock();
  }
}

}  // namespace nibble
