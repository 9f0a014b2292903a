// CHECK for bugs: a broken promise between our own functions. Bad input from a file, a flag or a request
// is never a CHECK; it is a Status (result.h).
#pragma once

namespace nibble {

// Prints `file:line: check failed: condition` to stderr and aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* condition);

}  // namespace nibble

#define NIBBLE_CHECK(condition)                        \
  (static_cast<bool>(condition) ? static_cast<void>(0) \
                                : ::nibble::check_failed(__FILE__, __LINE__, #condition))

// DCHECK: the same in hot loops, gone in Release.
#ifdef NDEBUG
#define NIBBLE_DCHECK(condition) static_cast<void>(0)
#else
#define NIBBLE_DCHECK(condition) NIBBLE_CHECK(condition)
#endif
