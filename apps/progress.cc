#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "base/log.h"
#include "base/numbers.h"

namespace nibble {

LoadProgressLine::LoadProgressLine(std::string what)
    : what_(std::move(what)), terminal_(::isatty(STDERR_FILENO) != 0), start_(Clock::now()), drawn_(start_) {}

void LoadProgressLine::update(int64_t loaded_bytes, int64_t total_bytes) {
  constexpr auto kRedraw = std::chrono::milliseconds(100);
  constexpr int64_t kBarWidth = 30;
  Clock::time_point now = Clock::now();
  if (!terminal_ || now - drawn_ < kRedraw || total_bytes <= 0) return;
  drawn_ = now;
  double seconds = std::chrono::duration<double>(now - start_).count();
  int64_t filled = std::min(kBarWidth, loaded_bytes * kBarWidth / total_bytes);
  fmt::print(stderr, "\r{} [{:#<{}}{: <{}}] {} of {}, {:.2f} GB/s ", what_, "", filled, "",
             kBarWidth - filled, format_bytes(loaded_bytes), format_bytes(total_bytes),
             static_cast<double>(loaded_bytes) / 1e9 / seconds);
  std::fflush(stderr);
}

void LoadProgressLine::finish(int64_t total_bytes) {
  if (terminal_) fmt::print(stderr, "\r\x1b[K");  // wipes the bar
  double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  log_info("{}: {} in {:.2f} s", what_, format_bytes(total_bytes), seconds);
}

}  // namespace nibble
