// Reads a file from front to back by small pieces, each checked against the end of the file before a byte of
// it is read or room is made for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/file.h"
#include "base/result.h"

namespace nibble {

// REQUIRES the file to outlive it. Messages do not name the file.
class GgufReader {
 public:
  explicit GgufReader(const File& file);

  int64_t position() const { return position_; }
  int64_t left() const { return file_bytes_ - position_; }

  // The next `size` bytes, valid until the next call. `what` is what they are, for the message of a file that
  // ends before.
  Result<std::string_view> take(uint64_t size, std::string_view what);

  // A little-endian number.
  template <class T>
  Result<T> number(std::string_view what) {
    static_assert(std::is_arithmetic_v<T>);
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view bytes, take(sizeof(T), what));
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }

  // A u64 length and that many bytes, at most `limit`; valid until the next call.
  Result<std::string_view> string(int64_t limit, std::string_view what);

 private:
  const File& file_;
  const int64_t file_bytes_;
  std::span<const std::byte> mapped_;  // empty: through window_
  int64_t position_ = 0;
  std::vector<std::byte> window_;  // what lies at window_begin_
  int64_t window_begin_ = 0;
};

}  // namespace nibble
