#include "base/log.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/one_line.h"

namespace nibble {
namespace {

// Process-wide by nature: stderr is one.
struct LogState {
  std::mutex mutex;
  LogLevel level = LogLevel::kInfo;
  std::FILE* file = nullptr;
};

LogState& state() {
  static LogState log_state;
  return log_state;
}

const char* prefix(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug: ";
    case LogLevel::kInfo:
      return "";
    case LogLevel::kWarning:
      return "warning: ";
    case LogLevel::kError:
      return "error: ";
  }
  return "";
}

}  // namespace

void set_log_level(LogLevel level) {
  std::lock_guard lock(state().mutex);
  state().level = level;
}

Status set_log_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) return user_error("--log-file {}: cannot open: {}", path, std::strerror(errno));
  std::lock_guard lock(state().mutex);
  if (state().file != nullptr) std::fclose(state().file);
  state().file = file;
  return {};
}

void log_line(LogLevel level, const std::string& text) {
  const std::string line = one_line(text);
  std::lock_guard lock(state().mutex);
  if (level < state().level) return;
  std::fprintf(stderr, "nibble: %s%s\n", prefix(level), line.c_str());
  if (state().file != nullptr) {
    std::fprintf(state().file, "nibble: %s%s\n", prefix(level), line.c_str());
    std::fflush(state().file);
  }
}

}  // namespace nibble
