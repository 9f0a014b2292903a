// Template source -> tokens, with trim_blocks, lstrip_blocks and the - and + marks already applied to the
// text between tags.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nibble::jinja {

enum class TokenKind : uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  int line = 1;
  std::string text;     // data, name, the string's value, or the operator's spelling
  int64_t integer = 0;  // kInteger
  double real = 0;      // kFloat
};

// Throws Error. REQUIRES `source` to be valid UTF-8. The last token is kEnd.
std::vector<Token> tokenize(const std::string& source);

}  // namespace nibble::jinja
