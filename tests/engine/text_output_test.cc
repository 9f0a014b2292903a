#include "engine/text_output.h"

#include <gtest/gtest.h>

#include <random>

#include "places.h"

namespace nibble {
namespace {

const Tokenizer& demo() {
  static const Tokenizer tokenizer =
      Tokenizer::load(FileSystem::posix(), demo_directory()).value();
  return tokenizer;
}

// The pieces that come out for a text, the last one from finish().
std::vector<std::string> pieces(const std::string& text, std::vector<std::string> stop,
                                bool* stopped = nullptr) {
  TextOutput output(demo(), std::move(stop));
  std::vector<std::string> out;
  for (int32_t id : demo().encode(text).value()) out.push_back(output.push(id));
  out.push_back(output.finish());
  if (stopped != nullptr) *stopped = output.stopped();
  return out;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

TEST(TextOutput, WithoutStopStringsTheTextComesAsItIs) {
  for (const std::string text :
       {"Once upon a time.", "日本語 текст 🚀👩‍👩‍👧", "", "a\tb\r\n"}) {
    for (const std::string& piece : pieces(text, {}))
      EXPECT_EQ(repair_utf8(piece), piece) << "half a character";
    EXPECT_EQ(joined(pieces(text, {})), text);
  }
}

TEST(TextOutput, SpecialTokensAreNoText) { EXPECT_EQ(joined(pieces("<|user|>hi<|end|>", {})), "hi"); }

TEST(TextOutput, NothingOfAStopStringIsShownHoweverTokensCutIt) {
  bool stopped = false;
  EXPECT_EQ(joined(pieces("one two three four", {"three"}, &stopped)), "one two ");
  EXPECT_TRUE(stopped);
  EXPECT_EQ(joined(pieces("one two three four", {"e t", "wo"}, &stopped)), "on");
  EXPECT_TRUE(stopped);
  // The start of a stop string that does not go on is text after all.
  EXPECT_EQ(joined(pieces("one two thr", {"three"}, &stopped)), "one two thr");
  EXPECT_FALSE(stopped);
  EXPECT_EQ(joined(pieces("aaab", {"aab"}, &stopped)), "a");
  EXPECT_TRUE(stopped);
  EXPECT_EQ(joined(pieces("one two", {""}, &stopped)), "one two");
  EXPECT_FALSE(stopped);
  EXPECT_EQ(joined(pieces("fünf Äpfel", {"Ä"}, &stopped)), "fünf ");
  EXPECT_TRUE(stopped);
}

// A law: what is shown is the text up to the stop string that is complete first, for any text and stop
// strings.
TEST(TextOutput, RandomTextsAndStopStrings) {
  std::mt19937 random(11);
  auto word = [&](size_t longest) {
    std::string text;
    for (size_t n = random() % (longest + 1); n > 0; --n) text += static_cast<char>('a' + random() % 3);
    return text;
  };
  for (int round = 0; round < 2000; ++round) {
    const std::string text = word(30);
    std::vector<std::string> stop = {word(4), word(3)};
    size_t first = std::string::npos;
    for (size_t end = 1; end <= text.size() && first == std::string::npos; ++end) {
      for (const std::string& s : stop) {
        if (!s.empty() && text.substr(0, end).ends_with(s)) first = std::min(first, end - s.size());
      }
    }
    bool stopped = false;
    EXPECT_EQ(joined(pieces(text, stop, &stopped)), text.substr(0, first)) << text;
    EXPECT_EQ(stopped, first != std::string::npos);
  }
}

}  // namespace
}  // namespace nibble
