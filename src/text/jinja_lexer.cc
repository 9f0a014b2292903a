#include "text/jinja_lexer.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {
namespace {

bool ascii_digit(char c) { return c >= '0' && c <= '9'; }

std::string normalize_newlines(const std::string& source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
      continue;
    }
    out += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(const std::string& source) : source_(normalize_newlines(source)) {}

  std::vector<Token> run() {
    while (position_ < source_.size()) lex_text();
    add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail_here(std::string message) const { throw Error{std::move(message), line_}; }

  bool at(std::string_view what, size_t position) const {
    return std::string_view(source_).substr(position).starts_with(what);
  }
  bool at(std::string_view what) const { return at(what, position_); }

  void add(TokenKind kind, std::string text) {
    Token token;
    token.kind = kind;
    token.line = line_;
    token.text = std::move(text);
    tokens_.push_back(std::move(token));
  }

  void advance(size_t end) {
    for (; position_ < end; ++position_) line_ += source_[position_] == '\n';
  }
  size_t skip_space(size_t position) const {
    while (position < source_.size()) {
      size_t next = position;
      if (!is_space(next_code_point(source_, next))) break;
      position = next;
    }
    return position;
  }
  bool line_starting() const { return position_ == 0 || source_[position_ - 1] == '\n'; }

  // The text before a tag: '-' takes all white space off its end, and a tag that is not {{ takes the white
  // space before it on its own line, unless '+' forbids that.
  std::string text_before_tag(size_t end, char mark, bool is_variable) const {
    const std::string_view text = std::string_view(source_).substr(position_, end - position_);
    if (mark == '-') return std::string(strip_right(text));
    if (mark == '+' || is_variable) return std::string(text);
    const size_t newline = text.rfind('\n');
    const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
    const bool own_line = line_begin > 0 || line_starting();
    if (own_line && strip_left(text.substr(line_begin)).empty())
      return std::string(text.substr(0, line_begin));
    return std::string(text);
  }

  char mark_at(size_t position) const {
    return position < source_.size() && (source_[position] == '-' || source_[position] == '+')
               ? source_[position]
               : '\0';
  }

  void lex_text() {
    size_t tag = position_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= source_.size()) {
        add(TokenKind::kData, source_.substr(position_));
        return advance(source_.size());
      }
      const char next = source_[tag + 1];
      if (next == '{' || next == '%' || next == '#') break;
    }
    const char mark = mark_at(tag + 2);
    const bool is_variable = source_[tag + 1] == '{';
    std::string text = text_before_tag(tag, mark, is_variable);
    if (!text.empty()) add(TokenKind::kData, std::move(text));
    advance(tag);
    const size_t inside = tag + 2 + (mark != 0 ? 1 : 0);
    if (is_variable) {
      add(TokenKind::kVariableBegin, "{{");
      advance(inside);
      lex_tag(true);
    } else if (source_[tag + 1] == '#') {
      advance(inside);
      skip_comment();
    } else if (!lex_raw(inside)) {
      add(TokenKind::kBlockBegin, "{%");
      advance(inside);
      lex_tag(false);
    }
  }

  // The end of `-%}` + white space, `+%}`, or `%}` + a newline; npos where none of them is.
  size_t end_of_block(size_t position, std::string_view close, bool trims, bool plus) const {
    if (position < source_.size() && source_[position] == '-' && at(close, position + 1)) {
      return skip_space(position + 1 + close.size());
    }
    if (plus && position < source_.size() && source_[position] == '+' && at(close, position + 1)) {
      return position + 1 + close.size();
    }
    if (!at(close, position)) return std::string::npos;
    position += close.size();
    return trims && position < source_.size() && source_[position] == '\n' ? position + 1 : position;
  }

  void skip_comment() {
    if (position_ >= source_.size()) return;  // opened at the very end: Jinja lets that pass
    for (size_t end = position_;; ++end) {
      end = source_.find("#}", end);
      if (end == std::string::npos) fail_here("missing end of comment tag");
      const size_t mark = end > position_ && mark_at(end - 1) != 0 ? end - 1 : end;
      return advance(end_of_block(mark, "#}", true, true));
    }
  }

  // {% raw %} ... {% endraw %}; false where the tag is another.
  bool lex_raw(size_t inside) {
    size_t position = skip_space(inside);
    if (!at("raw", position)) return false;
    position = end_of_block(skip_space(position + 3), "%}", false, false);
    if (position == std::string::npos) return false;
    advance(position);
    for (size_t end = source_.find("{%", position_); end != std::string::npos;
         end = source_.find("{%", end + 1)) {
      const char mark = mark_at(end + 2);
      const size_t name = skip_space(end + 2 + (mark != 0 ? 1 : 0));
      if (!at("endraw", name)) continue;
      const size_t behind = end_of_block(skip_space(name + 6), "%}", true, true);
      if (behind == std::string::npos) continue;
      std::string text = text_before_tag(end, mark, false);
      if (!text.empty()) add(TokenKind::kData, std::move(text));
      advance(behind);
      return true;
    }
    if (position_ < source_.size()) fail_here("missing end of raw directive");
    return true;  // opened at the very end: Jinja lets that pass
  }

  void lex_tag(bool is_variable) {
    std::string open;  // the brackets that are not closed yet
    while (true) {
      advance(skip_space(position_));
      if (position_ >= source_.size()) return;  // the parser says what is missing
      if (open.empty()) {
        const size_t end = is_variable ? end_of_block(position_, "}}", false, false)
                                       : end_of_block(position_, "%}", true, true);
        if (end != std::string::npos) {
          add(is_variable ? TokenKind::kVariableEnd : TokenKind::kBlockEnd, is_variable ? "}}" : "%}");
          return advance(end);
        }
      }
      lex_token(open);
    }
  }

  void lex_token(std::string& open) {
    const char c = source_[position_];
    if (ascii_digit(c)) return lex_number();
    if (c == '"' || c == '\'') return lex_string(c);
    size_t next = position_;
    if (const char32_t first = next_code_point(source_, next); is_word(first)) {
      while (next < source_.size()) {
        size_t after = next;
        if (!is_word(next_code_point(source_, after))) break;
        next = after;
      }
      if (is_numeric(first)) fail_here("invalid character in identifier");
      add(TokenKind::kName, source_.substr(position_, next - position_));
      return advance(next);
    }
    lex_operator(open);
  }

  void lex_operator(std::string& open) {
    constexpr std::string_view kDouble[] = {"//", "**", "==", "!=", ">=", "<="};
    constexpr std::string_view kSingle = "+-/*%~[](){}<>=.:|,;";
    std::string spelling;
    for (const std::string_view pair : kDouble) {
      if (at(pair)) spelling = pair;
    }
    if (spelling.empty() && kSingle.find(source_[position_]) != std::string_view::npos) {
      spelling = source_[position_];
    }
    if (spelling.empty()) {
      size_t next = position_;
      next_code_point(source_, next);
      fail_here(fmt::format("unexpected char '{}'", source_.substr(position_, next - position_)));
    }
    const char c = spelling[0];
    if (c == '(') open += ')';
    if (c == '[') open += ']';
    if (c == '{') open += '}';
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty()) fail_here(fmt::format("unexpected '{}'", c));
      if (open.back() != c) fail_here(fmt::format("unexpected '{}', expected '{}'", c, open.back()));
      open.pop_back();
    }
    const size_t end = position_ + spelling.size();
    add(TokenKind::kOperator, std::move(spelling));
    advance(end);
  }

  // The end of digits with single underscores between them; `position` where there is none.
  size_t digits_end(size_t position) const {
    while (position < source_.size() && ascii_digit(source_[position])) {
      ++position;
      if (position + 1 < source_.size() && source_[position] == '_' && ascii_digit(source_[position + 1])) {
        ++position;
      }
    }
    return position;
  }

  void lex_number() {
    const size_t whole = digits_end(position_);
    size_t end = whole;
    if (position_ == 0 || source_[position_ - 1] != '.') {
      if (end < source_.size() && source_[end] == '.' && digits_end(end + 1) > end + 1) {
        end = digits_end(end + 1);
      }
      if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
        const size_t digits = end + (mark_at(end + 1) != 0 ? 2 : 1);
        if (digits_end(digits) > digits) end = digits_end(digits);
      }
    }
    if (end > whole) {
      std::string text;
      for (const char c : source_.substr(position_, end - position_)) {
        if (c != '_') text += c;
      }
      add(TokenKind::kFloat, text);
      tokens_.back().real = std::strtod(text.c_str(), nullptr);
      return advance(end);
    }
    lex_integer();
  }

  void lex_integer() {
    int base = 10;
    const char prefix =
        position_ + 1 < source_.size() ? static_cast<char>(source_[position_ + 1] | 0x20) : '\0';
    if (source_[position_] == '0') base = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 10;
    const auto is_base_digit = [&](size_t position) {
      if (position >= source_.size()) return false;
      const char c = static_cast<char>(source_[position] | 0x20);
      const int value = ascii_digit(source_[position]) ? source_[position] - '0'
                        : c >= 'a' && c <= 'f'         ? c - 'a' + 10
                                                       : 99;
      return value < base;
    };
    size_t end = position_;
    std::string digits;
    if (base != 10) {
      end += 2;
      if (end < source_.size() && source_[end] == '_') ++end;
      if (!is_base_digit(end)) {
        base = 10;
        end = position_;
      }
    }
    const bool zeros_only = base == 10 && source_[end] == '0';  // 007 is 00 and then 7
    while (is_base_digit(end) && (!zeros_only || source_[end] == '0')) {
      digits += source_[end++];
      if (end < source_.size() && source_[end] == '_' && is_base_digit(end + 1) &&
          (!zeros_only || source_[end + 1] == '0')) {
        ++end;
      }
    }
    int64_t value = 0;
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
    if (parsed.ec != std::errc()) fail_here(fmt::format("integer {} does not fit 64 bits", digits));
    add(TokenKind::kInteger, digits);
    tokens_.back().integer = value;
    advance(end);
  }

  void lex_string(char quote) {
    size_t end = position_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size())
      fail_here(fmt::format("unexpected char {}: a string that does not end", quote));
    add(TokenKind::kString, unescape(std::string_view(source_).substr(position_ + 1, end - position_ - 1)));
    advance(end + 1);
  }

  char32_t escape_digits(std::string_view text, size_t& position, size_t count) const {
    uint32_t value = 0;
    const std::string_view digits = text.substr(position, count);
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() != count || parsed.ptr != digits.data() + count) {
      fail_here("truncated escape sequence in a string");
    }
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
      fail_here("escape sequence in a string is no character");
    }
    position += count;
    return value;
  }

  std::string unescape(std::string_view text) const {
    constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    std::string out;
    for (size_t i = 0; i < text.size();) {
      const char c = text[i++];
      if (c != '\\' || i >= text.size()) {
        out += c;
        continue;
      }
      const char escape = text[i++];
      if (const size_t known = kNames.find(escape); known != std::string_view::npos) {
        out += kValues[known];
      } else if (escape == 'x' || escape == 'u' || escape == 'U') {
        append_code_point(out, escape_digits(text, i, escape == 'x' ? 2 : escape == 'u' ? 4 : 8));
      } else if (escape >= '0' && escape <= '7') {
        char32_t value = static_cast<char32_t>(escape - '0');
        for (int n = 0; n < 2 && i < text.size() && text[i] >= '0' && text[i] <= '7'; ++n) {
          value = value * 8 + static_cast<char32_t>(text[i++] - '0');
        }
        append_code_point(out, value);
      } else if (escape == 'N') {
        fail_here("string escape \\N is not implemented");
      } else if (escape != '\n') {  // a backslash at the end of a line joins it with the next
        out += c;
        out += escape;
      }
    }
    return out;
  }

  std::string source_;
  size_t position_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(const std::string& source) { return Lexer(source).run(); }

}  // namespace nibble::jinja
