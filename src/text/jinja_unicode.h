// Code points in UTF-8 text, with Python's notions of space, letter, digit and printable. All text here is
// valid UTF-8: the template's source and the context are checked at the border.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace nibble::jinja {

bool is_valid_utf8(std::string_view text);

// The code point at `position`, which moves behind it. REQUIRES position < text.size().
char32_t next_code_point(std::string_view text, size_t& position);
void append_code_point(std::string& out, char32_t code_point);
int64_t count_code_points(std::string_view text);
// The byte offset of the code point with this index; text.size() for an index at or behind the end.
size_t byte_offset(std::string_view text, int64_t index);

bool is_space(char32_t c);      // str.isspace, and \s of Python's re
bool is_letter(char32_t c);     // str.isalpha
bool is_digit(char32_t c);      // str.isdigit
bool is_numeric(char32_t c);    // str.isnumeric
bool is_word(char32_t c);       // \w of Python's re
bool is_printable(char32_t c);  // what repr() leaves as it is
bool is_upper(char32_t c);
bool is_lower(char32_t c);
bool is_title(char32_t c);

// Python's str.upper, lower, capitalize and title. Of the mappings that change a length, the German sharp s,
// the dotted capital I and the final sigma are known.
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string title_case(std::string_view text);

std::string_view strip_left(std::string_view text);
std::string_view strip_right(std::string_view text);
// str.splitlines: the lines without their ends.
bool is_line_break(char32_t c);

}  // namespace nibble::jinja
