#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/log.h"
#include "base/numbers.h"

namespace nibble {
namespace {

// Beyond this it is not a time but a guess.
constexpr double kLongest_s = 100 * 3600;

std::string format_time_left(double seconds) {
  if (!(seconds < kLongest_s)) return "";
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  if (whole < 60) return fmt::format(", {} s left", whole);
  if (whole < 3600) return fmt::format(", {}:{:02} min left", whole / 60, whole % 60);
  return fmt::format(", {}:{:02} h left", whole / 3600, whole / 60 % 60);
}

}  // namespace

ProgressLine::ProgressLine(std::string what)
    : what_(std::move(what)), terminal_(::isatty(STDERR_FILENO) != 0), start_(Clock::now()), drawn_(start_) {}

bool ProgressLine::is_due() {
  constexpr auto kRedraw = std::chrono::milliseconds(100);
  if (!terminal_ && plain_interval_.count() == 0) return false;
  const Clock::time_point now = Clock::now();
  const Clock::duration interval = terminal_ ? Clock::duration(kRedraw) : Clock::duration(plain_interval_);
  if (now - drawn_ < interval) return false;
  drawn_ = now;
  return true;
}

void ProgressLine::draw(int64_t done, int64_t total, const std::string& numbers) {
  constexpr int64_t kBarWidth = 30;
  if (!terminal_) {
    log_info("{}: {}", what_, numbers);
    return;
  }
  // A share of the total, without the product that might not fit.
  const auto filled =
      std::clamp(static_cast<int64_t>(static_cast<double>(done) / static_cast<double>(total) * kBarWidth),
                 int64_t{0}, kBarWidth);
  fmt::print(stderr, "\r{} [{:#<{}}{: <{}}] {}\x1b[K", what_, "", filled, "", kBarWidth - filled, numbers);
  std::fflush(stderr);
}

void ProgressLine::update(int64_t done_bytes, int64_t total_bytes, int64_t found_bytes) {
  if (total_bytes <= 0 || !is_due()) return;
  const double bytes_per_s = static_cast<double>(done_bytes - found_bytes) / seconds();
  draw(done_bytes, total_bytes,
       fmt::format("{} of {}, {:.2f} GB/s{}", format_bytes(done_bytes), format_bytes(total_bytes),
                   bytes_per_s / 1e9,
                   format_time_left(static_cast<double>(total_bytes - done_bytes) / bytes_per_s)));
}

void ProgressLine::update_steps(int64_t done, int64_t total) {
  if (total <= 0 || !is_due()) return;
  const double steps_per_s = static_cast<double>(done) / seconds();
  draw(done, total,
       fmt::format("step {} of {}{}", done, total,
                   format_time_left(static_cast<double>(total - done) / steps_per_s)));
}

void ProgressLine::clear() {
  if (terminal_) fmt::print(stderr, "\r\x1b[K");
}

void ProgressLine::finish(int64_t total_bytes) {
  clear();
  const double all_seconds = seconds();
  log_info("{}: {} in {:.2f} s, {:.2f} GB/s", what_, format_bytes(total_bytes), all_seconds,
           static_cast<double>(total_bytes) / all_seconds / 1e9);
}

}  // namespace nibble
