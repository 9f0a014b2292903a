#include <gtest/gtest.h>

#include "text/byte_level.h"
#include "text/gguf_pre_tokenizers.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace nibble {
namespace {

using Ids = std::vector<int32_t>;
using enum GgufTokenType;

// Ids: a byte is itself; then ab, abc, Ġa, <|end|> (control), <tool> (user-defined).
constexpr int32_t kAb = 256, kAbc = 257, kSpaceA = 258, kEnd = 259, kTool = 260;
GgufVocabulary small_bpe() {
  GgufVocabulary vocabulary{.name = "m.gguf", .model = "gpt2", .pre = "gpt-2"};
  for (int byte = 0; byte < 256; ++byte) {
    std::string token;
    append_utf8(byte_to_character(static_cast<unsigned char>(byte)), token);
    vocabulary.tokens.push_back(token);
  }
  for (const char* token : {"ab", "abc", "\u0120a", "<|end|>", "<tool>"})
    vocabulary.tokens.emplace_back(token);
  vocabulary.types.assign(vocabulary.tokens.size(), kNormal);
  vocabulary.types[kEnd] = kControl;
  vocabulary.types[kTool] = kUserDefined;
  vocabulary.merges = {"a b", "ab c", "\u0120 a"};
  vocabulary.bos = kEnd;
  return vocabulary;
}

// Ids: <unk> <s> </s>, the 256 bytes, then the pieces below.
constexpr int32_t kFirstByte = 3, kFirstPiece = 259;
GgufVocabulary small_pieces() {
  GgufVocabulary vocabulary{.name = "m.gguf", .model = "llama", .bos = 1, .eos = 2, .unknown = 0};
  const auto add = [&](const std::string& token, GgufTokenType type, float score) {
    vocabulary.tokens.push_back(token);
    vocabulary.types.push_back(type);
    vocabulary.scores.push_back(score);
  };
  add("<unk>", kUnknown, 0);
  add("<s>", kControl, 0);
  add("</s>", kControl, 0);
  for (int byte = 0; byte < 256; ++byte) add(fmt::format("<0x{:02X}>", byte), kByte, 0);
  for (const char* piece : {"\u2581", "a", "b", "c", "s", "<", ">"}) add(piece, kNormal, -100);  // 259 ...
  add("ab", kNormal, -2);                                                                        // 266
  add("bc", kNormal, -1);                                                                        // 267
  add("\u2581a", kNormal, -3);                                                                   // 268
  add("abc", kNormal, -4);                                                                       // 269
  add("<s", kNormal, -5);                                                                        // 270
  add("cc", kUnused, -0.5F);                                                                     // 271
  add("ccc", kNormal, -0.6F);                                                                    // 272
  add("<user>", kUserDefined, 0);                                                                // 273
  add("aa", kNormal, -7);                                                                        // 274
  return vocabulary;
}

Tokenizer make(const GgufVocabulary& vocabulary) {
  Result<Tokenizer> tokenizer = Tokenizer::from_gguf(vocabulary);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return std::move(tokenizer).value();
}

std::string error_of(const GgufVocabulary& vocabulary) {
  return Tokenizer::from_gguf(vocabulary).status().message();
}

TEST(GgufTokenizer, ByteLevel) {
  const Tokenizer tokenizer = make(small_bpe());
  EXPECT_EQ(tokenizer.vocab_size(), 261);
  EXPECT_EQ(tokenizer.encode("abc ab").value(), (Ids{kAbc, ' ', kAb}));  // a b merges before \u0120 a
  EXPECT_EQ(tokenizer.encode("abc ac").value(), (Ids{kAbc, kSpaceA, 'c'}));
  EXPECT_EQ(tokenizer.encode("a<|end|>b<tool>").value(), (Ids{'a', kEnd, 'b', kTool}));
  const Ids plain = tokenizer.encode("<|end|><tool>", {.parse_special = false}).value();
  EXPECT_EQ(plain, (Ids{'<', '|', 'e', 'n', 'd', '|', '>', kTool}));
  EXPECT_EQ(tokenizer.decode(Ids{kAbc, kEnd, kSpaceA, kTool, 0xC3, 0xA4}, true), "abc a<tool>\u00e4");
  EXPECT_EQ(tokenizer.decode(Ids{kEnd}, false), "<|end|>");
  EXPECT_EQ(tokenizer.token_id("<|end|>"), kEnd);
  EXPECT_EQ(tokenizer.token_id("ab"), kAb);
  EXPECT_TRUE(tokenizer.is_special(kEnd));
  EXPECT_FALSE(tokenizer.is_special(kTool));
}

TEST(GgufTokenizer, BeginAndEnd) {
  GgufVocabulary vocabulary = small_bpe();
  EXPECT_EQ(make(vocabulary).encode("a").value(), Ids{'a'});
  vocabulary.pre = "llama-bpe";  // such models begin with bos where the file does not say
  EXPECT_EQ(make(vocabulary).encode("a").value(), (Ids{kEnd, 'a'}));
  vocabulary.add_bos = false;
  EXPECT_EQ(make(vocabulary).encode("a").value(), Ids{'a'});
  vocabulary.add_eos = true;
  EXPECT_EQ(error_of(vocabulary),
            "m.gguf: tokenizer.ggml.add_eos_token: is true, but there is no eos_token_id");
  vocabulary.eos = kAb;
  EXPECT_EQ(make(vocabulary).encode("a").value(), (Ids{'a', kAb}));
  EXPECT_EQ(make(vocabulary).encode("a", {.add_special = false}).value(), Ids{'a'});
  vocabulary.add_bos = true;
  vocabulary.bos.reset();
  EXPECT_EQ(error_of(vocabulary),
            "m.gguf: tokenizer.ggml.add_bos_token: is true, but there is no bos_token_id");
}

TEST(GgufTokenizer, AnEmptyTokenIsAnIdOfNoToken) {
  GgufVocabulary vocabulary = small_bpe();
  vocabulary.tokens.insert(vocabulary.tokens.end(), 2, "");
  vocabulary.types.insert(vocabulary.types.end(), 2, kUserDefined);
  const Tokenizer tokenizer = make(vocabulary);
  EXPECT_EQ(tokenizer.encode("abc").value(), Ids{kAbc});
  EXPECT_EQ(tokenizer.decode(Ids{261, 'a'}, false), "a");
}

TEST(GgufTokenizer, EveryPreTokenizerCompilesAndLosesNothing) {
  const std::string text = "Hello, w\u00f6rld's  123 4567\n\n\u4f60\u597d \uac00 \u3042 <x>";
  std::string names = gguf_pre_tokenizer_names() + ", ";
  int count = 0;
  for (size_t at = 0; at < names.size(); at = names.find(", ", at) + 2, ++count) {
    GgufVocabulary vocabulary = small_bpe();
    vocabulary.pre = names.substr(at, names.find(", ", at) - at);
    const Tokenizer tokenizer = make(vocabulary);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text).value(), true), text) << vocabulary.pre;
  }
  EXPECT_GT(count, 30);
  GgufVocabulary vocabulary = small_bpe();
  vocabulary.pre = "";  // files from before the key
  EXPECT_EQ(make(vocabulary).encode("abc").value(), Ids{kAbc});
}

TEST(GgufTokenizer, PiecesMergeByScoreFromTheLeft) {
  const Tokenizer tokenizer = make(small_pieces());
  EXPECT_EQ(tokenizer.encode("bc", {.add_special = false}).value(), (Ids{kFirstPiece, 267}));
  // bc before ab; then the space and a.
  EXPECT_EQ(tokenizer.encode("abc").value(), (Ids{1, 268, 267}));
  EXPECT_EQ(tokenizer.encode(" ab").value(), (Ids{1, kFirstPiece, kFirstPiece, 266}));
  // Of equal scores the leftmost.
  EXPECT_EQ(tokenizer.encode("aaaa", {.add_special = false}).value(), (Ids{268, 274, 260}));
  EXPECT_EQ(tokenizer.encode("").value(), Ids{1});
  EXPECT_EQ(tokenizer.encode("\u00e4", {.add_special = false}).value(),
            (Ids{kFirstPiece, kFirstByte + 0xC3, kFirstByte + 0xA4}));
}

TEST(GgufTokenizer, UnusedPiecesAreTakenApart) {
  const Tokenizer tokenizer = make(small_pieces());
  EXPECT_EQ(tokenizer.encode("cc", {.add_special = false}).value(), (Ids{kFirstPiece, 262, 262}));
  // On the way to a piece that is in use they count.
  EXPECT_EQ(tokenizer.encode("ccc", {.add_special = false}).value(), (Ids{kFirstPiece, 272}));
}

TEST(GgufTokenizer, TextMakesNoControlToken) {
  const Tokenizer tokenizer = make(small_pieces());
  EXPECT_EQ(tokenizer.encode("<s>", {.parse_special = false, .add_special = false}).value(),
            (Ids{kFirstPiece, 270, 265}));
  EXPECT_EQ(tokenizer.encode("<s>", {.add_special = false}).value(), Ids{1});
  EXPECT_EQ(tokenizer.encode("a<user>", {.parse_special = false, .add_special = false}).value(),
            (Ids{268, 273}));
  // The spelling of a byte token is text.
  const Ids ids = tokenizer.encode("<0x61>", {.add_special = false}).value();
  EXPECT_EQ(std::count(ids.begin(), ids.end(), kFirstByte + 0x61), 0);
}

TEST(GgufTokenizer, PiecesDecode) {
  const Tokenizer tokenizer = make(small_pieces());
  for (const char* text : {"abc", " abc", "a  b\n", "\u00e4<s>", ""}) {
    const Ids ids = tokenizer.encode(text, {.parse_special = false}).value();
    EXPECT_EQ(tokenizer.decode(ids, true), text);
    EXPECT_EQ(tokenizer.decode_bytes(ids, true), *text == '\0' ? "" : std::string(" ") + text);
  }
  GgufVocabulary vocabulary = small_pieces();
  vocabulary.add_space_prefix = false;
  const Tokenizer plain = make(vocabulary);
  EXPECT_EQ(plain.encode("bc").value(), (Ids{1, 267}));
  EXPECT_EQ(plain.decode(Ids{1, kFirstPiece, 267}, true), " bc");
}

TEST(GgufTokenizer, CharactersInNoPiece) {
  GgufVocabulary vocabulary = small_pieces();
  vocabulary.tokens[kFirstByte + 0xA4] = "gone";
  vocabulary.types[kFirstByte + 0xA4] = kNormal;
  EXPECT_EQ(make(vocabulary).encode("\u00e4").value(), (Ids{1, kFirstPiece, 0}));
  vocabulary.unknown.reset();
  EXPECT_EQ(
      make(vocabulary).encode("\u00e4").status().message(),
      "the character \"\u00e4\" is in no token, and there is neither a byte token nor an unknown token");
}

TEST(GgufTokenizer, BadVocabularies) {
  const struct {
    GgufVocabulary (*base)();
    void (*change)(GgufVocabulary&);
    const char* wanted;
  } cases[] = {
      {small_bpe, [](auto& v) { v.model = "bert"; },
       "m.gguf: tokenizer.ggml.model: \"bert\" is not implemented (gpt2 and llama are)"},
      {small_bpe, [](auto& v) { v.tokens.clear(); }, "m.gguf: tokenizer.ggml.tokens: no tokens"},
      {small_bpe, [](auto& v) { v.types.pop_back(); },
       "m.gguf: tokenizer.ggml.token_type: wanted one for each of 261 tokens, found 260"},
      {small_bpe, [](auto& v) { v.tokens[7] = "\xff"; },
       "m.gguf: tokenizer.ggml.tokens[7]: \"\ufffd\" is not UTF-8"},
      {small_bpe, [](auto& v) { v.tokens[260] = "ab"; },
       "m.gguf: tokenizer.ggml.tokens[260]: \"ab\" is also token 256"},
      {small_bpe, [](auto& v) { v.eos = 261; },
       "m.gguf: tokenizer.ggml.eos_token_id: wanted an id from 0 to 260, found 261"},
      {small_bpe, [](auto& v) { v.merges[1] = "abc"; },
       "m.gguf: tokenizer.ggml.merges[1]: wanted two tokens with a space between, found \"abc\""},
      {small_bpe, [](auto& v) { v.merges[1] = "a \xff"; },
       "m.gguf: tokenizer.ggml.merges[1]: wanted two tokens with a space between, found \"a \ufffd\""},
      {small_bpe, [](auto& v) { v.merges[1] = "ab x"; },
       "m.gguf.merges[1]: the token \"abx\" is not in the vocabulary"},
      {small_bpe, [](auto& v) { v.tokens[260] = std::string(1025, 'x'); },
       "m.gguf: tokenizer.ggml.tokens: the added token 260 has 1025 bytes, more than 1024"},
      {small_pieces, [](auto& v) { v.scores.pop_back(); },
       "m.gguf: wanted a score for each of 275 tokens, found 274"},
      {small_pieces, [](auto& v) { v.scores[5] = NAN; }, "m.gguf: token 5: its score is NaN"},
      {small_pieces, [](auto& v) { v.tokens[5] = "<0x2>"; },
       "m.gguf: token 5: wanted a byte token like <0x0A>, found \"<0x2>\""},
      {small_pieces, [](auto& v) { v.tokens[5] = "<0x0a>"; },
       "m.gguf: token 5: wanted a byte token like <0x0A>, found \"<0x0a>\""},
      {small_pieces, [](auto& v) { v.tokens[5] = "<0x01>"; }, "m.gguf: token 5: \"<0x01>\" is also token 4"},
      {small_pieces, [](auto& v) { v.tokens[260] = "b"; }, "m.gguf: token 261: \"b\" is also token 260"},
  };
  for (const auto& bad : cases) {
    GgufVocabulary vocabulary = bad.base();
    bad.change(vocabulary);
    EXPECT_EQ(error_of(vocabulary), bad.wanted);
  }
  GgufVocabulary vocabulary = small_bpe();
  vocabulary.pre = "novel";
  EXPECT_TRUE(error_of(vocabulary)
                  .starts_with("m.gguf: tokenizer.ggml.pre: \"novel\" is not implemented (default, gpt-2, "));
}

}  // namespace
}  // namespace nibble
