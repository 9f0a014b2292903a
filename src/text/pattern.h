// Regular expressions as tokenizer.json holds them are in Oniguruma's dialect; ours run on PCRE2. The two
// differ in what the same letters mean, so a pattern is read and written anew, construct by construct, and
// what has no sure equal is refused by name.
//
// What differs and is translated: \s (PCRE2 adds U+180E), \w and \b (Oniguruma: Alphabetic, M, Nd, Pc), \h (a
// hex digit), \v (one character), `.`, scripts (PCRE2 means script extensions), {n,m}+ (not possessive),
// {n}? (not lazy), {,m}, nested classes and && in classes. `^` and `$` match at lines in both (the caller
// compiles with PCRE2_MULTILINE).
// What is left: under (?i) Oniguruma also lets `ss` match U+00DF and such, one character for several; a range
// of characters that takes in characters newer than Unicode 14 (unicode_age.h).
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

constexpr size_t kMaxPatternBytes = 16384;

// The same pattern for PCRE2 with UTF, UCP and MULTILINE, without capturing groups. REQUIRES valid UTF-8.
Result<std::string> translate_pattern(std::string_view pattern);
// A pattern in the dialect of translate_pattern's result that matches exactly `text`.
std::string literal_pattern(std::string_view text);

}  // namespace nibble
