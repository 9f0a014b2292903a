// The parts of a pattern that stand for one character: escapes, properties, classes (pattern.h).
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

struct Escape {
  enum class Kind {
    kCharacter,   // one character
    kSet,         // `text` is the inside of a class
    kNotSet,      // all but that
    kExpression,  // `text` matches something
    kAssertion,   // `text` matches at a place
  };
  Kind kind;
  char32_t character = 0;
  std::string text;
};

// Reads what `\` begins and takes it off `rest`.
Result<Escape> read_escape(std::string_view& rest);

// Reads what `[` begins and takes it off `rest`; gives an expression that matches one character. `depth` is
// the nesting so far.
Result<std::string> translate_class(std::string_view& rest, bool ignore_case, int depth);

// The character as a literal, in a class or not.
void append_literal(char32_t character, std::string& out);

}  // namespace nibble
