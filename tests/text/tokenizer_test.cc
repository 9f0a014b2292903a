#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "text/tokenizer_parts.h"
#include "places.h"

namespace nibble {
namespace {

using Ids = std::vector<int32_t>;
using nlohmann::json;

Tokenizer make(const json& file) {
  Result<Tokenizer> tokenizer = Tokenizer::parse(file.dump(), "t.json");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return std::move(tokenizer).value();
}

Ids encode(const Tokenizer& tokenizer, std::string_view text, const EncodeOptions& options = {}) {
  Result<Ids> ids = tokenizer.encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.status().message();
  return ids.ok() ? *ids : Ids{};
}

// The small tokenizer, where `set` changed it, on `text`.
template <class Change>
Ids encode_with(std::string_view text, Change change, const EncodeOptions& options = {}) {
  json file = small_tokenizer();
  change(file);
  return encode(make(file), text, options);
}

void add_token(json& file, const std::string& content, std::initializer_list<const char*> flags) {
  json token = {{"id", 262 + file["added_tokens"].size()}, {"content", content}};
  for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized", "special"}) token[flag] = false;
  for (const char* flag : flags) token[flag] = true;
  file["added_tokens"].push_back(token);
}

json split(const std::string& kind, const std::string& pattern, const std::string& behavior,
           bool invert = false) {
  return {{"type", "Split"}, {"pattern", {{kind, pattern}}}, {"behavior", behavior}, {"invert", invert}};
}

json then_byte_level(const json& step) {
  return {{"type", "Sequence"}, {"pretokenizers", {step, small_tokenizer()["pre_tokenizer"]}}};
}

TEST(Tokenizer, DemoModelEqualsThePackage) {
  const std::string root = source_directory();
  Result<Tokenizer> tokenizer = Tokenizer::load(FileSystem::posix(), root + "/models/demo");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  Result<std::string> text =
      read_text(FileSystem::posix(), root + "/tests/golden/demo/tokenizer_golden.json", 1 << 20);
  ASSERT_TRUE(text.ok());
  json golden = json::parse(*text);
  ASSERT_GE(golden.size(), 15U);
  for (const json& sample : golden) {
    Ids ids = encode(*tokenizer, sample["text"].get<std::string>());
    EXPECT_EQ(ids, sample["ids"].get<Ids>()) << sample["text"];
    EXPECT_EQ(tokenizer->decode(ids, false), sample["decoded"].get<std::string>());
  }
  EXPECT_EQ(tokenizer->vocab_size(), 8192);
}

TEST(Tokenizer, MergesByRankThenFromTheLeft) {
  Tokenizer tokenizer = make(small_tokenizer());
  EXPECT_EQ(encode(tokenizer, "abc"), Ids{kAbc});
  EXPECT_EQ(encode(tokenizer, "bc"), Ids{kBc});
  EXPECT_EQ(encode(tokenizer, "aabcc"), (Ids{'a', kAbc, 'c'}));
  EXPECT_EQ(encode(tokenizer, "xxxxxxx"), (Ids{kXxxx, kXx, 'x'}));
  EXPECT_EQ(encode(tokenizer, " ab"), (Ids{' ', kAb}));
  EXPECT_EQ(encode(tokenizer, ""), Ids{});
}

TEST(Tokenizer, BothMergeFormsAreTheSame) {
  json file = small_tokenizer();
  for (json& merge : file["model"]["merges"]) {
    std::string line = merge;
    merge = {line.substr(0, line.find(' ')), line.substr(line.find(' ') + 1)};
  }
  EXPECT_EQ(encode(make(file), "aabcc xxx"), encode(make(small_tokenizer()), "aabcc xxx"));
}

TEST(Tokenizer, IgnoreMergesTakesAWholePieceFirst) {
  auto set = [](json& file) {
    file["model"]["vocab"]["zz"] = 262;
    file["added_tokens"] = json::array();
    file["model"]["ignore_merges"] = true;
  };
  EXPECT_EQ(encode_with("zz", set), Ids{262});
  EXPECT_EQ(encode_with("zzz", set), (Ids{'z', 'z', 'z'}));
}

TEST(Tokenizer, UnknownCharacters) {
  auto without_z = [](json& file) { file["model"]["vocab"].erase("z"); };
  json file = small_tokenizer();
  without_z(file);
  file["added_tokens"] = json::array();
  Result<Ids> ids = make(file).encode("az");
  ASSERT_FALSE(ids.ok());
  EXPECT_NE(ids.status().message().find("U+007A"), std::string::npos) << ids.status().message();
  file["model"]["unk_token"] = "?";
  EXPECT_EQ(encode(make(file), "azzb"), (Ids{'a', '?', '?', 'b'}));
  file["model"]["fuse_unk"] = true;
  EXPECT_EQ(encode(make(file), "azzbz"), (Ids{'a', '?', 'b', '?'}));
}

TEST(Tokenizer, SpecialTokensInText) {
  Tokenizer tokenizer = make(small_tokenizer());
  EXPECT_EQ(encode(tokenizer, "ab<|end|>c"), (Ids{kAb, kEnd, 'c'}));
  EXPECT_EQ(encode(tokenizer, "<|end|>", {.parse_special = false}).size(), 7U);
  EXPECT_TRUE(tokenizer.is_special(kEnd));
  EXPECT_FALSE(tokenizer.is_special(kAb));
  EXPECT_FALSE(tokenizer.is_special(-1));
  EXPECT_FALSE(tokenizer.is_special(INT32_MAX));
  EXPECT_EQ(tokenizer.token_id("<|end|>"), kEnd);
  EXPECT_EQ(tokenizer.token_id("abc"), kAbc);
  EXPECT_EQ(tokenizer.token_id("nothing"), std::nullopt);
  EXPECT_EQ(tokenizer.vocab_size(), kEnd + 1);
}

TEST(Tokenizer, AddedTokenFlags) {
  auto left = [](json& file) { add_token(file, "<t>", {"lstrip"}); };
  EXPECT_EQ(encode_with("a \n<t> b", left), (Ids{'a', 263, ' ', 'b'}));
  auto right = [](json& file) { add_token(file, "<t>", {"rstrip"}); };
  EXPECT_EQ(encode_with("a <t>\u3000 b", right), (Ids{'a', ' ', 263, 'b'}));
  auto word = [](json& file) { add_token(file, "qq", {"single_word"}); };
  EXPECT_EQ(encode_with("qq qqq (qq)", word), (Ids{263, ' ', 'q', 'q', 'q', ' ', '(', 263, ')'}));
  auto longest = [](json& file) {
    add_token(file, "<t", {});
    add_token(file, "<t>", {});
  };
  EXPECT_EQ(encode_with("<t><t", longest), (Ids{264, 263}));
  auto lowercase = [](json& file) {
    file["normalizer"] = {{"type", "Lowercase"}};
    add_token(file, "TOK", {"normalized"});
    add_token(file, "RAW", {});
  };
  EXPECT_EQ(encode_with("tokTokRAWraw", lowercase), (Ids{263, 263, 264, 'r', 'a', 'w'}));
}

TEST(Tokenizer, Normalizers) {
  auto nfc = [](json& file) { file["normalizer"] = {{"type", "NFC"}}; };
  EXPECT_EQ(encode_with("e\u0301", nfc), (Ids{0xC3, 0xA9}));
  auto nfd = [](json& file) { file["normalizer"] = {{"type", "NFD"}}; };
  EXPECT_EQ(encode_with("\u00e9", nfd), (Ids{'e', 0xCC, 0x81}));
  auto nfkc = [](json& file) { file["normalizer"] = {{"type", "NFKC"}}; };
  EXPECT_EQ(encode_with("\ufb01", nfkc), (Ids{'f', 'i'}));
  auto several = [](json& file) {
    json replace = {{"type", "Replace"}, {"pattern", {{"String", "q"}}}, {"content", "ab"}};
    file["normalizer"] = {
        {"type", "Sequence"},
        {"normalizers", {{{"type", "Prepend"}, {"prepend", "Q"}}, {{"type", "Lowercase"}}, replace}}};
  };
  EXPECT_EQ(encode_with("c", several), Ids{kAbc});
  EXPECT_EQ(encode_with("", several), Ids{});
}

TEST(Tokenizer, SplitBehaviors) {
  auto with = [](const char* behavior, bool invert) {
    return encode_with("x-x--x", [&](json& file) {
      file["pre_tokenizer"] = then_byte_level(split("String", "-", behavior, invert));
    });
  };
  EXPECT_EQ(with("Removed", false), (Ids{'x', 'x', 'x'}));  // pieces, so that no two x merge
  EXPECT_EQ(with("Isolated", false), (Ids{'x', '-', 'x', '-', '-', 'x'}));
  EXPECT_EQ(with("Removed", true), (Ids{'-', '-', '-'}));
  auto pieces = [](const char* behavior) {
    // Which dashes and letters share a piece shows in merges of the two.
    json file = small_tokenizer();
    file["added_tokens"] = json::array();
    file["model"]["vocab"]["x-"] = 262;
    file["model"]["vocab"]["-x"] = 263;
    file["model"]["vocab"]["--"] = 264;
    file["model"]["merges"] = {"x -", "- x", "- -"};
    file["pre_tokenizer"] = then_byte_level(split("Regex", "-", behavior));
    return encode(make(file), "x-x--x");
  };
  EXPECT_EQ(pieces("MergedWithPrevious"), (Ids{262, 262, '-', 'x'}));
  EXPECT_EQ(pieces("MergedWithNext"), (Ids{'x', 263, '-', 263}));
  EXPECT_EQ(pieces("Contiguous"), (Ids{'x', '-', 'x', 264, 'x'}));
}

TEST(Tokenizer, DigitsAndPrefixSpace) {
  auto digits = [](json& file) {
    file["pre_tokenizer"] = then_byte_level({{"type", "Digits"}, {"individual_digits", true}});
    file["model"]["vocab"]["11"] = 262;
    file["model"]["merges"].push_back("1 1");
    file["added_tokens"] = json::array();
  };
  EXPECT_EQ(encode_with("11", digits), (Ids{'1', '1'}));
  auto runs = [&](json& file) {
    digits(file);
    file["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = false;
  };
  EXPECT_EQ(encode_with("11", runs), Ids{262});
  auto space = [](json& file) { file["pre_tokenizer"]["add_prefix_space"] = true; };
  EXPECT_EQ(encode_with("a", space), Ids{kSpaceA});
  EXPECT_EQ(encode_with(" a", space), Ids{kSpaceA});
}

TEST(Tokenizer, TemplateSurroundsTheSequence) {
  auto set = [](json& file) {
    json token = {{"SpecialToken", {{"id", "E"}, {"type_id", 0}}}};
    json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
    file["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", {token, text, token}},
        {"pair", json::array()},
        {"special_tokens", {{"E", {{"id", "E"}, {"ids", {262, 65}}, {"tokens", {"e", "A"}}}}}}};
  };
  EXPECT_EQ(encode_with("ab", set), (Ids{262, 65, kAb, 262, 65}));
  EXPECT_EQ(encode_with("ab", set, {.add_special = false}), Ids{kAb});
}

TEST(Tokenizer, DecodesWholeBytes) {
  Tokenizer tokenizer = make(small_tokenizer());
  EXPECT_EQ(tokenizer.decode_bytes(Ids{0xE2, 0x82}, false), "\xE2\x82");
  EXPECT_EQ(tokenizer.decode(Ids{0xE2, 0x82}, false), "\xEF\xBF\xBD");
  EXPECT_EQ(tokenizer.decode(Ids{0xE2, 0x82, 0xAC, kEnd, kAb}, true), "\u20acab");
  EXPECT_EQ(tokenizer.decode(Ids{kAb, kEnd}, false), "ab<|end|>");
  EXPECT_EQ(tokenizer.decode(Ids{-1, INT32_MIN, INT32_MAX, 263, 'a'}, false), "a");
  json file = small_tokenizer();
  add_token(file, "\u65e5 x", {});      // not of the byte-level alphabet: stands for itself
  add_token(file, "\u0120\u0120", {});  // of the alphabet: two spaces
  EXPECT_EQ(make(file).decode(Ids{263, 264, 'a'}, false), "\u65e5 x  a");
  file["decoder"] = nullptr;
  EXPECT_EQ(make(file).decode(Ids{'a', kAb}, false), "a ab");
}

TEST(Tokenizer, InvalidTextIsRepaired) {
  Tokenizer tokenizer = make(small_tokenizer());
  EXPECT_EQ(encode(tokenizer, "a\xFF\xC3"), encode(tokenizer, "a\uFFFD\uFFFD"));
}

// A law: without a normalizer, decoding what was encoded gives the text.
TEST(Tokenizer, RoundTripOfRandomText) {
  Result<Tokenizer> tokenizer =
      Tokenizer::load(FileSystem::posix(), demo_directory());
  ASSERT_TRUE(tokenizer.ok());
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (size_t n = random() % 60; n > 0; --n) {
      auto code = static_cast<char32_t>(random() % 2 == 0 ? random() % 0x80 : random() % 0x110000);
      if (code < 0xD800 || code >= 0xE000) append_utf8(code, text);
    }
    EXPECT_EQ(tokenizer->decode(encode(*tokenizer, text), false), text);
  }
}

TEST(Tokenizer, LongTextsEnd) {
  Tokenizer small = make(small_tokenizer());
  Result<Tokenizer> demo =
      Tokenizer::load(FileSystem::posix(), demo_directory());
  ASSERT_TRUE(demo.ok());
  auto nfc_file = small_tokenizer();
  nfc_file["normalizer"] = {{"type", "NFC"}};
  Tokenizer nfc = make(nfc_file);
  std::string marks;
  for (int i = 0; i < 250'000; ++i) marks += "\u0315\u0334";  // ever out of order
  // A quadratic algorithm would run into the test's time limit.
  EXPECT_EQ(encode(small, std::string(1 << 20, 'x')), Ids(1 << 18, kXxxx));
  encode(*demo, std::string(1 << 20, 'e'));
  encode(*demo, std::string(1 << 20, ' ') + "x");
  encode(*demo, std::string(1 << 20, '\n') + "x");
  encode(nfc, marks);
}

TEST(Tokenizer, AHostilePatternIsAnErrorNotAHang) {
  for (const char* pattern : {"(x+x+)+[yz]", "(?:x|xx)+$y", "(?=(x*)*z)q"}) {
    json file = small_tokenizer();
    file["pre_tokenizer"] = then_byte_level(split("Regex", pattern, "Isolated"));
    Result<Ids> ids = make(file).encode(std::string(3000, 'x'));
    if (!ids.ok()) {
      EXPECT_NE(ids.status().message().find("a regular expression"), std::string::npos);
    }
    EXPECT_TRUE(std::string(pattern) != "(x+x+)+[yz]" || !ids.ok());
  }
}

TEST(Tokenizer, OneTokenizerServesManyThreads) {
  Result<Tokenizer> demo =
      Tokenizer::load(FileSystem::posix(), demo_directory());
  ASSERT_TRUE(demo.ok());
  const std::string text = "It's 12345 o'clock <|end|> \u65e5\u672c\u8a9e; don't!";
  const Ids wanted = encode(*demo, text);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) wrong[t] += encode(*demo, text) != wanted;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace nibble
