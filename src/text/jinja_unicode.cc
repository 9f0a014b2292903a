#include "text/jinja_unicode.h"

#include <utf8proc.h>

namespace nibble::jinja {
namespace {

utf8proc_category_t category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

char32_t simple_upper(char32_t c) {
  return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}
char32_t simple_lower(char32_t c) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
char32_t simple_title(char32_t c) {
  return static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c)));
}

constexpr char32_t kSharpS = 0xDF;
constexpr char32_t kCapitalSigma = 0x3A3;
constexpr char32_t kFinalSigma = 0x3C2;
constexpr char32_t kDottedCapitalI = 0x130;

bool is_cased(char32_t c) { return is_upper(c) || is_lower(c) || is_title(c); }

// Whether the sigma between `before` (its last letter, 0 for none) and `rest` ends a word.
bool ends_word(bool cased_before, std::string_view rest) {
  if (!cased_before) return false;
  return rest.empty() || [&] {
    size_t position = 0;
    return !is_cased(next_code_point(rest, position));
  }();
}

void append_lower(std::string& out, char32_t c, bool cased_before, std::string_view rest) {
  if (c == kCapitalSigma && ends_word(cased_before, rest)) {
    append_code_point(out, kFinalSigma);
  } else if (c == kDottedCapitalI) {
    out += "i\xCC\x87";  // i and a combining dot above
  } else {
    append_code_point(out, simple_lower(c));
  }
}

void append_title(std::string& out, char32_t c) {
  if (c == kSharpS) {
    out += "Ss";
  } else {
    append_code_point(out, simple_title(c));
  }
}

}  // namespace

bool is_valid_utf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  size_t position = 0;
  while (position < text.size()) {
    if (static_cast<unsigned char>(text[position]) < 0x80) {
      ++position;
      continue;
    }
    utf8proc_int32_t c = 0;
    const utf8proc_ssize_t length =
        utf8proc_iterate(bytes + position, static_cast<utf8proc_ssize_t>(text.size() - position), &c);
    if (length <= 0) return false;
    position += static_cast<size_t>(length);
  }
  return true;
}

char32_t next_code_point(std::string_view text, size_t& position) {
  const auto byte = [&](size_t i) -> char32_t {
    return i < text.size() ? static_cast<unsigned char>(text[i]) & 0x3F : 0;
  };
  const auto first = static_cast<unsigned char>(text[position]);
  char32_t c = first;
  size_t length = 1;
  if (first >= 0xF0) {
    c = (first & 0x07U) << 18 | byte(position + 1) << 12 | byte(position + 2) << 6 | byte(position + 3);
    length = 4;
  } else if (first >= 0xE0) {
    c = (first & 0x0FU) << 12 | byte(position + 1) << 6 | byte(position + 2);
    length = 3;
  } else if (first >= 0xC0) {
    c = (first & 0x1FU) << 6 | byte(position + 1);
    length = 2;
  }
  position = std::min(position + length, text.size());
  return c;
}

void append_code_point(std::string& out, char32_t code_point) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t length =
      utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), static_cast<utf8proc_uint8_t*>(bytes));
  out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
}

int64_t count_code_points(std::string_view text) {
  int64_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

size_t byte_offset(std::string_view text, int64_t index) {
  size_t position = 0;
  while (index > 0 && position < text.size()) {
    ++position;
    while (position < text.size() && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80) ++position;
    --index;
  }
  return position;
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_line_break(char32_t c) {
  return (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

bool is_letter(char32_t c) {
  const auto k = category(c);
  return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

bool is_digit(char32_t c) {
  return category(c) == UTF8PROC_CATEGORY_ND || c == 0xB2 || c == 0xB3 || c == 0xB9 || c == 0x2070 ||
         (c >= 0x2074 && c <= 0x2079) || (c >= 0x2080 && c <= 0x2089) || (c >= 0x2460 && c <= 0x2468);
}

bool is_numeric(char32_t c) {
  const auto k = category(c);
  return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

bool is_word(char32_t c) { return c == '_' || is_letter(c) || is_numeric(c); }

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

bool is_upper(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU; }
bool is_lower(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL || c == 0xAA || c == 0xBA; }
bool is_title(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LT; }

std::string to_upper(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (c == kSharpS) {
      out += "SS";
    } else {
      append_code_point(out, simple_upper(c));
    }
  }
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  bool cased_before = false;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    append_lower(out, c, cased_before, text.substr(i));
    cased_before = is_cased(c);
  }
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out;
  if (text.empty()) return out;
  size_t i = 0;
  const char32_t first = next_code_point(text, i);
  append_title(out, first);
  bool cased_before = is_cased(first);
  while (i < text.size()) {
    const char32_t c = next_code_point(text, i);
    append_lower(out, c, cased_before, text.substr(i));
    cased_before = is_cased(c);
  }
  return out;
}

std::string title_case(std::string_view text) {
  std::string out;
  bool cased_before = false;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (cased_before) {
      append_lower(out, c, cased_before, text.substr(i));
    } else {
      append_title(out, c);
    }
    cased_before = is_cased(c);
  }
  return out;
}

std::string_view strip_left(std::string_view text) {
  size_t begin = 0;
  while (begin < text.size()) {
    size_t next = begin;
    if (!is_space(next_code_point(text, next))) break;
    begin = next;
  }
  return text.substr(begin);
}

std::string_view strip_right(std::string_view text) {
  while (!text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    size_t position = start;
    if (!is_space(next_code_point(text, position))) break;
    text = text.substr(0, start);
  }
  return text;
}

}  // namespace nibble::jinja
