#include "engine/text_output.h"

#include <algorithm>
#include <string_view>

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

std::string TextOutput::release(std::string text) {
  held_ += text;
  size_t first_stop = std::string::npos;
  for (const std::string& stop : stop_) first_stop = std::min(first_stop, held_.find(stop));
  if (first_stop != std::string::npos) {
    stopped_ = true;
    return std::exchange(held_, "").substr(0, first_stop);
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
