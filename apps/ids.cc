#include "ids.h"

#include <charconv>
#include <iostream>

namespace nibble {

Result<std::vector<int32_t>> parse_ids(std::string_view text, const std::string& name) {
  constexpr std::string_view kBetween = " ,\n\r\t[]";
  std::vector<int32_t> ids;
  for (size_t at = text.find_first_not_of(kBetween); at != std::string_view::npos;
       at = text.find_first_not_of(kBetween, at)) {
    std::string_view word = text.substr(at, text.find_first_of(kBetween, at) - at);
    int32_t id = 0;
    auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || end != word.data() + word.size() || id < 0) {
      return user_error("{}: wanted token ids such as 5,17,42, found '{}'", name, word.substr(0, 40));
    }
    ids.push_back(id);
    at += word.size();
  }
  return ids;
}

Result<std::string> read_standard_input() {
  std::string text;
  char buffer[1 << 16];
  while (std::cin.read(buffer, sizeof(buffer)) || std::cin.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(std::cin.gcount()));
    if (static_cast<int64_t>(text.size()) > kMaxInputBytes)
      return user_error("standard input: more than the {} bytes that are read", kMaxInputBytes);
  }
  return text;
}

}  // namespace nibble
