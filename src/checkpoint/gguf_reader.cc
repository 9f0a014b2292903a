#include "checkpoint/gguf_reader.h"

#include <algorithm>

namespace nibble {
namespace {

constexpr int64_t kWindowBytes = 64 << 10;  // one read for some thousand of small pieces

}  // namespace

GgufReader::GgufReader(const File& file) : file_(file), file_bytes_(file.size_bytes()) {
  if (std::span<const std::byte> mapped = file.map(); std::ssize(mapped) >= file_bytes_) mapped_ = mapped;
}

Result<std::string_view> GgufReader::take(uint64_t size, std::string_view what) {
  if (size > static_cast<uint64_t>(left())) {
    return user_error("truncated: file has {} bytes, but {} of {} bytes begins at byte {}", file_bytes_, what,
                      size, position_);
  }
  const auto wanted = static_cast<int64_t>(size);
  const std::byte* bytes = nullptr;
  if (!mapped_.empty()) {
    bytes = mapped_.data() + position_;
  } else {
    if (position_ + wanted > window_begin_ + std::ssize(window_)) {
      const int64_t window_bytes = std::min(std::max(wanted, kWindowBytes), left());
      window_begin_ = position_;
      window_.resize(static_cast<size_t>(window_bytes));
      NIBBLE_RETURN_IF_ERROR(file_.read_at(position_, window_));
    }
    bytes = window_.data() + (position_ - window_begin_);
  }
  position_ += wanted;
  return std::string_view(reinterpret_cast<const char*>(bytes), size);
}

Result<std::string_view> GgufReader::string(int64_t limit, std::string_view what) {
  NIBBLE_ASSIGN_OR_RETURN(const auto size, number<uint64_t>(what));
  // What the file cannot hold is truncated, also where it is more than allowed.
  if (size > static_cast<uint64_t>(limit) && size <= static_cast<uint64_t>(left()))
    return user_error("{} has {} bytes, more than the {} that nibble reads", what, size, limit);
  return take(size, what);
}

}  // namespace nibble
