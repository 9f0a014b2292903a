#include "ids.h"

#include <charconv>
#include <iostream>
#include <iterator>

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

std::string read_standard_input() {
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

}  // namespace nibble
