// GPT-2's printable alphabet for bytes: every byte is one character, so that a vocabulary of text can hold
// any bytes. Printable Latin-1 stands for itself; the other bytes follow in order from U+0100.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace nibble {

char32_t byte_to_character(unsigned char byte);
std::optional<unsigned char> character_to_byte(char32_t character);

// Appends one character for each byte.
void append_byte_level(std::string_view bytes, std::string& out);
// The bytes of a token; a token that holds any character outside the alphabet stands for its own UTF-8.
// REQUIRES valid UTF-8.
std::string byte_level_to_bytes(std::string_view token);

}  // namespace nibble
