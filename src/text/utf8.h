// UTF-8: validation, repair, and cutting a byte stream at whole characters.
#pragma once

#include <string>
#include <string_view>

namespace nibble {

// Every maximal invalid subpart becomes one U+FFFD (Unicode 15 3.9, as Python and Rust do).
std::string repair_utf8(std::string_view bytes);

// Takes bytes as tokens bring them and gives whole characters, so that a stream never shows half of one.
class Utf8Stream {
 public:
  // What can be shown after these bytes; invalid bytes come out as U+FFFD as soon as they are known to be so.
  std::string push(std::string_view bytes);
  // What is left at the end: an unfinished character as U+FFFD.
  std::string finish();

 private:
  std::string pending_;  // at most 3 bytes: the start of a character
};

}  // namespace nibble
