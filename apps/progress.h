// A progress line on stderr while a model loads: redrawn with GB/s on a terminal, one plain line otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace nibble {

class LoadProgressLine {
 public:
  explicit LoadProgressLine(std::string what);
  void update(int64_t loaded_bytes, int64_t total_bytes);
  // The closing line: bytes, seconds, GB/s.
  void finish(int64_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  bool terminal_;
  Clock::time_point start_, drawn_;
};

}  // namespace nibble
