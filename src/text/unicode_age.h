// The same text must fall into the same pieces whatever Unicode version a library below us knows. These
// tables bridge the versions: regular expressions of the `tokenizers` package (Oniguruma) know Unicode 16,
// our PCRE2 may know only 14; the package's normalizer knows Unicode 10, utf8proc 15 and more.
// tests/python/tokenizer_test.py holds every code point to the package.
#pragma once

#include <string>
#include <string_view>

namespace nibble {

// Text of the same length with the same characters at the same bytes, save that each character newer than
// Unicode 14 is an older one of the same general category, script (for Han, Hiragana, Katakana, Hangul,
// Latin, Greek, Hebrew, Thai) and UTF-8 length: what patterns are matched against. REQUIRES valid UTF-8.
std::string older_look_alike(std::string_view text);

// True where the package's normalizer leaves the character alone: no decomposition, no composition, no
// reordering across it, though newer Unicode has them.
bool is_inert_in_normalization(char32_t code);

// Rust's char::to_lowercase (Unicode 17), which the package's Lowercase applies to each character.
void append_lowercase(char32_t code, std::string& out);

// Numbers that are newer than Unicode 16: the package's Digits (Rust, Unicode 17) knows them, its regular
// expressions do not.
bool is_number_newer_than_16(char32_t code);

}  // namespace nibble
