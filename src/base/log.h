// Lines for the operator, on stderr (and in --log-file): `nibble: warning: ...`. Results go to stdout, never
// here.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "base/result.h"

namespace nibble {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// What is below `level` is dropped. Default: kInfo.
void set_log_level(LogLevel level);
// Also append every line to this file.
Status set_log_file(const std::string& path);
void log_line(LogLevel level, const std::string& line);

template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace nibble
