#include "text/pattern_escape.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "text/json_fields.h"
#include "text/utf8.h"

namespace nibble {
namespace {

constexpr int kMaxClassDepth = 20;
constexpr const char* kSpace = "\\p{White_Space}";
constexpr const char* kDigit = "\\p{Nd}";
constexpr const char* kHexDigit = "0-9A-Fa-f";
// Oniguruma's \w; the superscripts and fractions of Latin-1 are a quirk of its table for small characters.
constexpr const char* kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}";

// Properties on which both engines agree for every code point (with unicode_age.h).
constexpr std::string_view kCategories[] = {"l",  "lu", "ll", "lt", "lm", "lo", "m",  "mn", "mc",
                                            "me", "n",  "nd", "nl", "no", "p",  "pc", "pd", "ps",
                                            "pe", "pi", "pf", "po", "s",  "sm", "sc", "sk", "so",
                                            "z",  "zs", "zl", "zp", "c",  "cc", "cf", "cn", "co"};
constexpr std::pair<std::string_view, std::string_view> kNames[] = {
    {"letter", "L"},
    {"mark", "M"},
    {"number", "N"},
    {"punctuation", "P"},
    {"symbol", "S"},
    {"separator", "Z"},
    {"han", "sc:Han"},
    {"hiragana", "sc:Hiragana"},
    {"katakana", "sc:Katakana"},
    {"hangul", "sc:Hangul"},
    {"latin", "sc:Latin"},
    {"greek", "sc:Greek"},
    {"hebrew", "sc:Hebrew"},
    {"thai", "sc:Thai"},
    {"whitespace", "White_Space"},
    {"space", "White_Space"},
    {"digit", "Nd"},
};

bool is_letter_or_digit(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

// PCRE2's name of a property, or nothing.
std::optional<std::string> property_name(std::string_view name) {
  std::string plain;
  for (char c : name) {
    if (c == ' ' || c == '_' || c == '-') continue;
    plain += static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  }
  if (std::find(std::begin(kCategories), std::end(kCategories), plain) != std::end(kCategories)) {
    plain[0] = static_cast<char>(plain[0] - 'a' + 'A');
    return plain;
  }
  for (const auto& [known, pcre_name] : kNames) {
    if (plain == known) return std::string(pcre_name);
  }
  return std::nullopt;
}

// What follows `\p` or `\P`: `{Name}` or `{^Name}`.
Result<Escape> read_property(std::string_view& rest, bool negated) {
  size_t end = rest.find('}');
  if (!rest.starts_with("{") || end == std::string_view::npos)
    return user_error("wanted {{property}} after \\p");
  std::string_view name = rest.substr(1, end - 1);
  rest.remove_prefix(end + 1);
  if (name.starts_with("^")) {
    negated = !negated;
    name.remove_prefix(1);
  }
  std::optional<std::string> known = property_name(name);
  if (!known.has_value()) return user_error("the property {} is not implemented", in_quotes(name));
  return Escape{Escape::Kind::kSet, 0, fmt::format("\\{}{{{}}}", negated ? 'P' : 'p', *known)};
}

// The number that hex digits spell, at most `longest` of them; takes them off.
std::optional<char32_t> read_hex(std::string_view& rest, size_t longest) {
  char32_t value = 0;
  size_t digits = 0;
  for (; digits < std::min(longest, rest.size()); ++digits) {
    char c = rest[digits];
    int digit = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
    if (digit < 0) break;
    value = value * 16 + static_cast<char32_t>(digit);
  }
  rest.remove_prefix(digits);
  if (digits == 0) return std::nullopt;
  return value;
}

// What follows `\x` or `\u`.
Result<Escape> read_code(std::string_view& rest, char kind) {
  std::string_view whole = rest;
  std::optional<char32_t> code;
  if (kind == 'u') {
    code = read_hex(rest, 4);
    if (whole.size() - rest.size() != 4) code.reset();
  } else if (rest.starts_with("{")) {
    rest.remove_prefix(1);
    code = read_hex(rest, 6);
    if (!rest.starts_with("}")) code.reset();
    if (!rest.empty()) rest.remove_prefix(1);
  } else {
    code = read_hex(rest, 2);
    if (code.has_value() && *code >= 0x80) code.reset();  // a byte, not a character
  }
  char32_t character = code.value_or(0x110000);
  if (character > 0x10FFFF || (character >= 0xD800 && character < 0xE000)) {
    return user_error("the construct {} is not implemented",
                      in_quotes(fmt::format("\\{}{}", kind, whole.substr(0, 8))));
  }
  return Escape{Escape::Kind::kCharacter, character, ""};
}

}  // namespace

void append_literal(char32_t character, std::string& out) {
  if (character < 0x80 && is_letter_or_digit(static_cast<char>(character))) {
    out += static_cast<char>(character);
  } else {
    out += fmt::format("\\x{{{:X}}}", static_cast<uint32_t>(character));
  }
}

Result<Escape> read_escape(std::string_view& rest) {
  rest.remove_prefix(1);
  if (rest.empty()) return user_error("a \\ escapes nothing");
  Utf8Character character = first_character(rest);
  rest.remove_prefix(character.size_bytes);
  auto one = [](char32_t code) { return Escape{Escape::Kind::kCharacter, code, ""}; };
  auto set = [](std::string text) { return Escape{Escape::Kind::kSet, 0, std::move(text)}; };
  auto not_set = [](std::string text) { return Escape{Escape::Kind::kNotSet, 0, std::move(text)}; };
  auto assertion = [](std::string text) { return Escape{Escape::Kind::kAssertion, 0, std::move(text)}; };
  std::string word = fmt::format("[{}]", kWord);
  switch (character.code) {
    case 't':
      return one('\t');
    case 'n':
      return one('\n');
    case 'r':
      return one('\r');
    case 'f':
      return one('\f');
    case 'v':
      return one('\v');
    case 'a':
      return one('\a');
    case 'e':
      return one(0x1B);
    case 's':
      return set(kSpace);
    case 'S':
      return not_set(kSpace);
    case 'd':
      return set(kDigit);
    case 'D':
      return not_set(kDigit);
    case 'w':
      return set(kWord);
    case 'W':
      return not_set(kWord);
    case 'h':
      return set(kHexDigit);
    case 'H':
      return not_set(kHexDigit);
    case 'p':
    case 'P':
      return read_property(rest, character.code == 'P');
    case 'x':
    case 'u':
      return read_code(rest, static_cast<char>(character.code));
    case 'R':
      return Escape{Escape::Kind::kExpression, 0, "(?>\\r\\n|[\\n-\\r\\x{85}\\x{2028}\\x{2029}])"};
    case 'A':
      return assertion("\\A");
    case 'z':
      return assertion("\\z");
    case 'Z':
      return assertion("\\Z");
    case 'b':
      return assertion("(?:(?<=" + word + ")(?!" + word + ")|(?<!" + word + ")(?=" + word + "))");
    case 'B':
      return assertion("(?:(?<=" + word + ")(?=" + word + ")|(?<!" + word + ")(?!" + word + "))");
    default:
      break;
  }
  if (character.code < 0x80 && is_letter_or_digit(static_cast<char>(character.code))) {
    return user_error("the construct {} is not implemented",
                      in_quotes(fmt::format("\\{}", static_cast<char>(character.code))));
  }
  return one(character.code);
}

namespace {

// Items side by side, between `[`, `&&` and `]`.
struct Operand {
  std::string items;                // the inside of a class
  std::vector<std::string> nested;  // expressions
};

std::string operand_expression(const Operand& operand) {
  std::string out = operand.items.empty() ? "" : fmt::format("[{}]", operand.items);
  for (const std::string& nested : operand.nested) out += (out.empty() ? "" : "|") + nested;
  return operand.nested.empty() ? out : fmt::format("(?:{})", out);
}

class ClassReader {
 public:
  ClassReader(std::string_view& rest, bool ignore_case, int depth)
      : rest_(rest), ignore_case_(ignore_case), depth_(depth) {}

  Result<std::string> read() {
    if (depth_ == kMaxClassDepth)
      return user_error("character classes are nested more than {} deep", kMaxClassDepth);
    rest_.remove_prefix(1);
    bool negated = take("^");
    if (rest_.starts_with("]")) return user_error("a character class is empty");
    bool at_start = true;
    while (!take("]")) {
      if (rest_.empty()) return user_error("a character class is not closed");
      NIBBLE_RETURN_IF_ERROR(read_item(at_start));
      at_start = false;
    }
    operands_.push_back(std::move(operand_));
    return expression(negated);
  }

 private:
  bool take(std::string_view prefix) {
    if (!rest_.starts_with(prefix)) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }

  Result<std::string> expression(bool negated) const {
    for (const Operand& operand : operands_) {
      if (operand.items.empty() && operand.nested.empty()) return user_error("one side of && is empty");
    }
    if (operands_.size() == 1 && operands_[0].nested.empty())
      return fmt::format("[{}{}]", negated ? "^" : "", operands_[0].items);
    // Every operand matches one character: an intersection is the last one where all others look ahead.
    std::string out;
    for (size_t i = 0; i < operands_.size(); ++i) {
      std::string operand = operand_expression(operands_[i]);
      out += i + 1 < operands_.size() ? fmt::format("(?={})", operand) : operand;
    }
    return fmt::format(fmt::runtime(negated ? "(?:(?!{})(?s:.))" : "(?:{})"), out);
  }

  Status read_item(bool at_start) {
    if (take("&&")) {
      operands_.push_back(std::move(operand_));
      operand_ = {};
      return {};
    }
    if (rest_.starts_with("[:")) {
      if (take("[:space:]")) {
        operand_.items += kSpace;
      } else if (take("[:digit:]")) {
        operand_.items += kDigit;
      } else {
        return user_error("the construct {} is not implemented", in_quotes(rest_.substr(0, 10)));
      }
      return {};
    }
    if (rest_.starts_with("[")) {
      NIBBLE_ASSIGN_OR_RETURN(std::string nested, translate_class(rest_, ignore_case_, depth_ + 1));
      operand_.nested.push_back(std::move(nested));
      return {};
    }
    if (rest_.starts_with("-") && !at_start && !rest_.starts_with("-]"))
      return user_error("a - in the midst of a character class is not implemented (\\- is)");
    NIBBLE_ASSIGN_OR_RETURN(Escape low, read_character());
    if (low.kind == Escape::Kind::kSet) {
      // Under (?i) Oniguruma closes properties under case folding and PCRE2 does not.
      if (ignore_case_ && low.text != kSpace && low.text != kDigit && low.text != kHexDigit)
        return user_error("a property in a character class under (?i) is not implemented");
      operand_.items += low.text;
      return {};
    }
    append_literal(low.character, operand_.items);
    if (!rest_.starts_with("-") || rest_.starts_with("-]") || rest_.starts_with("-&&") ||
        rest_.starts_with("-["))
      return {};
    rest_.remove_prefix(1);
    if (rest_.empty()) return user_error("a character class is not closed");
    NIBBLE_ASSIGN_OR_RETURN(Escape high, read_character());
    if (high.kind != Escape::Kind::kCharacter || high.character < low.character)
      return user_error("a range in a character class ends before it starts, or in no character");
    operand_.items += '-';
    append_literal(high.character, operand_.items);
    return {};
  }

  // A character, or the inside of a class.
  Result<Escape> read_character() {
    if (!rest_.starts_with("\\")) {
      Utf8Character character = first_character(rest_);
      rest_.remove_prefix(character.size_bytes);
      return Escape{Escape::Kind::kCharacter, character.code, ""};
    }
    std::string_view whole = rest_;
    NIBBLE_ASSIGN_OR_RETURN(Escape escape, read_escape(rest_));
    if (whole.starts_with("\\b")) return Escape{Escape::Kind::kCharacter, '\b', ""};
    if (escape.kind == Escape::Kind::kNotSet && (escape.text == kSpace || escape.text == kDigit)) {
      escape.kind = Escape::Kind::kSet;
      escape.text[1] = 'P';
      return escape;
    }
    if (escape.kind != Escape::Kind::kCharacter && escape.kind != Escape::Kind::kSet)
      return user_error("the construct {} in a character class is not implemented",
                        in_quotes(whole.substr(0, 2)));
    return escape;
  }

  std::string_view& rest_;
  bool ignore_case_;
  int depth_;
  Operand operand_;
  std::vector<Operand> operands_;
};

}  // namespace

Result<std::string> translate_class(std::string_view& rest, bool ignore_case, int depth) {
  return ClassReader(rest, ignore_case, depth).read();
}

}  // namespace nibble
