#include "engine/text_output.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace nibble {

TextOutput::TextOutput(const Tokenizer& tokenizer, std::vector<std::string> stop)
    : tokenizer_(tokenizer), stop_(std::move(stop)) {
  std::erase(stop_, "");
}

std::string TextOutput::push(int32_t token) {
  if (stopped_) return "";
  return release(characters_.push(tokenizer_.decode_bytes(std::span(&token, 1), true)));
}

std::string TextOutput::finish() {
  if (stopped_) return "";
  std::string text = release(characters_.finish());
  if (!stopped_) text += std::exchange(held_, "");
  return text;
}

std::string TextOutput::release(const std::string& text) {
  held_ += text;
  // The stop string that is complete first, the longest of those: so that the result does not hang on where
  // tokens cut the text.
  size_t first_end = std::string::npos, its_start = std::string::npos;
  for (const std::string& stop : stop_) {
    const size_t start = held_.find(stop);
    if (start == std::string::npos) continue;
    const size_t end = start + stop.size();
    if (end < first_end || (end == first_end && start < its_start)) {
      first_end = end;
      its_start = start;
    }
  }
  if (its_start != std::string::npos) {
    stopped_ = true;
    return std::exchange(held_, "").substr(0, its_start);
  }
  // The longest end of the text that starts some stop string stays back.
  size_t hold = 0;
  for (const std::string& stop : stop_) {
    for (size_t n = std::min(held_.size(), stop.size() - 1); n > hold; --n) {
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) hold = n;
    }
  }
  std::string shown = held_.substr(0, held_.size() - hold);
  held_.erase(0, shown.size());
  return shown;
}

}  // namespace nibble
