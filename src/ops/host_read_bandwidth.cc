#include "ops/host_read_bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "ops/memory.h"

namespace nibble {
namespace {

// A cache line at once: the compiler makes of it what the machine has.
using Line = uint64_t __attribute__((vector_size(64)));

// Reads them as so many streams side by side. Some cores follow a single one by themselves; others read
// three times as fast if several are asked for ahead.
template <int kStreams>
uint64_t read_all(const Line* lines, int64_t count) {
  constexpr int64_t kAhead = 4096 / sizeof(Line);
  const int64_t each = count / kStreams;
  Line sums[2] = {};  // more would not stay in registers
  for (int64_t i = 0; i + 1 < each; i += 2) {
    for (const Line* at = lines + i; at < lines + kStreams * each; at += each) {
      for (int j = 0; j < 2; ++j) {
        if (kStreams > 1) __builtin_prefetch(at + j + kAhead);
        sums[j] += at[j];
      }
    }
  }
  sums[0] += sums[1];
  return sums[0][0] + sums[0][7];  // all were needed for the sum of each
}

}  // namespace

Result<double> host_read_bandwidth(ThreadPool& pool) {
  constexpr int64_t kBytes = INT64_C(1) << 30;      // more than any cache
  constexpr int64_t kTaskBytes = INT64_C(4) << 20;  // worth some 100 us, so that handing it out costs nothing
  constexpr int kPasses = 8;
  NIBBLE_ASSIGN_OR_RETURN(const Buffer buffer,
                          Buffer::allocate(host_memory(), kBytes, "measuring the read bandwidth"));
  use_huge_pages(buffer);  // as weights have them
  auto* bytes = buffer.as<std::byte>();
  pool.parallel_for(kBytes / kTaskBytes, [&](int64_t task) {
    std::memset(bytes + task * kTaskBytes, 1, static_cast<size_t>(kTaskBytes));
  });
  std::atomic<uint64_t> sink = 0;
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto read = pass % 2 == 0 ? read_all<1> : read_all<4>;
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(kBytes / kTaskBytes, [&](int64_t task) {
      sink += read(reinterpret_cast<const Line*>(bytes + task * kTaskBytes),
                   kTaskBytes / static_cast<int64_t>(sizeof(Line)));
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kBytes) / seconds.count());
  }
  NIBBLE_CHECK(sink != 0);  // and so it was computed
  return best;
}

}  // namespace nibble
