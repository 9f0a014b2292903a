#include "text/utf8.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace nibble {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

TEST(Utf8, RepairsEveryMaximalSubpart) {
  struct Case {
    std::string bytes, repaired;
  };
  const Case cases[] = {
      {"", ""},
      {"abc", "abc"},
      {"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x9A\x80", "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x9A\x80"},
      {"\x80", kBad},
      {"\xC0\xAF", kBad + kBad},                        // an overlong slash
      {"\xE0\x9F\xBF", kBad + kBad + kBad},             // overlong
      {"\xED\xA0\x80", kBad + kBad + kBad},             // a surrogate
      {"\xF4\x90\x80\x80", kBad + kBad + kBad + kBad},  // past U+10FFFF
      {"\xF0\x9F\x9A", kBad},                           // cut off
      {"\xF0\x9F\x9A"
       "a",
       kBad + "a"},                                      // broken off
      {"\xE2\x82\xE2\x82\xAC", kBad + "\xE2\x82\xAC"},   // broken off by another
      {"\xF1\x80\x80\xE1\x80\xC2", kBad + kBad + kBad},  // the standard's own example
      {std::string("a\0b", 3), std::string("a\0b", 3)},
      {"\xFF\xFE", kBad + kBad},
  };
  for (const Case& c : cases) EXPECT_EQ(repair_utf8(c.bytes), c.repaired) << testing::PrintToString(c.bytes);
}

TEST(Utf8, CharactersRoundTrip) {
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    std::string text;
    append_utf8(code, text);
    ASSERT_EQ(repair_utf8(text), text) << static_cast<uint32_t>(code);
    ASSERT_EQ(first_character(text + "x").code, code);
    ASSERT_EQ(first_character(text).size_bytes, text.size());
    ASSERT_EQ(last_character("x" + text).code, code);
  }
}

TEST(Utf8, StreamShowsCharactersWhenTheyAreWhole) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xF0\x9F"), "a");
  EXPECT_EQ(stream.push("\x9A"), "");
  EXPECT_EQ(stream.push("\x80z"), "\xF0\x9F\x9A\x80z");
  EXPECT_EQ(stream.push("\xE2"), "");
  EXPECT_EQ(stream.push("\xE2"), kBad);  // known to be invalid by now
  EXPECT_EQ(stream.finish(), kBad);
  EXPECT_EQ(stream.finish(), "");
}

// Any cut into pushes gives what the whole gives.
TEST(Utf8, StreamEqualsRepairForAnySplit) {
  std::mt19937 random(7);
  const std::string alphabet = "ab\x80\xBF\xC2\xC3\xE0\xA0\xE2\x82\xAC\xED\x9F\xF0\x90\xF4\x8F\xF1\xFF";
  for (int round = 0; round < 20000; ++round) {
    std::string bytes;
    for (size_t n = random() % 24; n > 0; --n) {
      if (random() % 3 == 0) {
        append_utf8(static_cast<char32_t>(random() % 0xD800), bytes);
      } else {
        bytes += alphabet[random() % alphabet.size()];
      }
    }
    Utf8Stream stream;
    std::string shown;
    for (size_t at = 0; at < bytes.size();) {
      size_t size = random() % 5;
      std::string part = stream.push(std::string_view(bytes).substr(at, size));
      ASSERT_EQ(repair_utf8(part), part) << "half of a character was shown";
      shown += part;
      at += size;
    }
    shown += stream.finish();
    ASSERT_EQ(shown, repair_utf8(bytes)) << testing::PrintToString(bytes);
  }
}

}  // namespace
}  // namespace nibble
