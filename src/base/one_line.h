// Text from files and users, made safe for a message.
#pragma once

#include <string>

namespace nibble {

// Control characters (line ends, terminal escapes) become spaces.
inline std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return text;
}

}  // namespace nibble
