// A progress line on stderr for work that goes through many bytes (or steps): redrawn with GB/s and the time
// left on a terminal; elsewhere a closing line, and on wish a plain line now and then.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace nibble {

class ProgressLine {
 public:
  explicit ProgressLine(std::string what);

  // Where stderr is no terminal, update() prints a line this often. Default: never.
  void plain_every(std::chrono::seconds interval) { plain_interval_ = interval; }
  // `found_bytes` of the done ones were there before the work began, and say nothing about its speed.
  void update(int64_t done_bytes, int64_t total_bytes, int64_t found_bytes = 0);
  // The same of work that is counted in steps.
  void update_steps(int64_t done, int64_t total);
  // Wipes the bar, before an error is printed.
  void clear();
  // The closing line: bytes, seconds, speed.
  void finish(int64_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  // Whether it is time for a new line.
  bool is_due();
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  void draw(int64_t done, int64_t total, const std::string& numbers);

  std::string what_;
  bool terminal_;
  std::chrono::seconds plain_interval_{0};
  Clock::time_point start_, drawn_;
};

}  // namespace nibble
