#include "text/byte_level.h"

#include <array>

#include "text/utf8.h"

namespace nibble {
namespace {

constexpr int kCharacters = 0x144;  // the alphabet ends at U+0143: 68 bytes do not stand for themselves

struct Alphabet {
  std::array<char32_t, 256> character{};
  std::array<int, kCharacters> byte{};  // -1 where a character is not of the alphabet
};

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  for (int& byte : alphabet.byte) byte = -1;
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    char32_t character = stands_for_itself(byte) ? static_cast<char32_t>(byte) : next++;
    alphabet.character[byte] = character;
    alphabet.byte[character] = byte;
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

char32_t byte_to_character(unsigned char byte) { return kAlphabet.character[byte]; }

std::optional<unsigned char> character_to_byte(char32_t character) {
  if (character >= kCharacters || kAlphabet.byte[character] < 0) return std::nullopt;
  return static_cast<unsigned char>(kAlphabet.byte[character]);
}

void append_byte_level(std::string_view bytes, std::string& out) {
  for (char byte : bytes) append_utf8(byte_to_character(static_cast<unsigned char>(byte)), out);
}

std::string byte_level_to_bytes(std::string_view token) {
  std::string out;
  std::string_view rest = token;
  while (!rest.empty()) {
    Utf8Character character = first_character(rest);
    std::optional<unsigned char> byte = character_to_byte(character.code);
    if (!byte.has_value()) return std::string(token);
    out.push_back(static_cast<char>(*byte));
    rest.remove_prefix(character.size_bytes);
  }
  return out;
}

}  // namespace nibble
