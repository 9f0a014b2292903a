// UTF-8: validation, repair, characters, and cutting a byte stream at whole characters.
#pragma once

#include <string>
#include <string_view>

namespace nibble {

// Every maximal invalid subpart becomes one U+FFFD (Unicode 15 3.9, as Python and Rust do).
std::string repair_utf8(std::string_view bytes);

struct Utf8Character {
  char32_t code;
  size_t size_bytes;
};
// The character that `text` begins with. REQUIRES text is not empty and valid UTF-8.
Utf8Character first_character(std::string_view text);
// The character that `text` ends with. REQUIRES the same.
Utf8Character last_character(std::string_view text);
// REQUIRES code is a Unicode scalar value.
void append_utf8(char32_t code, std::string& out);

// Takes bytes as tokens bring them and gives whole characters, so that a stream never shows half of one.
// Law: all that push gives, then finish, is repair_utf8 of all the bytes, however they were cut.
class Utf8Stream {
 public:
  // What can be shown after these bytes; invalid bytes come out as U+FFFD as soon as they are known to be so.
  std::string push(std::string_view bytes);
  // What is left at the end: an unfinished character as U+FFFD. The stream can then be used anew.
  std::string finish();

 private:
  std::string pending_;  // at most 3 bytes: the start of a character
};

}  // namespace nibble
