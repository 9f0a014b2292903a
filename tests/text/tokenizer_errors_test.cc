// What a tokenizer.json must not be, and what the one line of error says of it.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"

namespace nibble {
namespace {

using nlohmann::json;

struct BadFile {
  std::function<void(json&)> change;
  std::vector<std::string> says;
};

json regex(const std::string& pattern) {
  return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
}

const BadFile kBadFiles[] = {
    {[](json& f) { f = 3; }, {"wanted an object", "the number 3"}},
    {[](json& f) { f["version"] = "2.0"; }, {"version", "1.0", "2.0"}},
    {[](json& f) { f["surprise"] = true; }, {"\"surprise\"", "not implemented"}},
    {[](json& f) { f.erase("model"); }, {"t.json: model", "wanted an object", "nothing"}},
    {[](json& f) { f["model"] = json::array(); }, {"model", "an array"}},
    {[](json& f) { f["model"]["type"] = "Unigram"; }, {"model.type", "Unigram"}},
    {[](json& f) { f["model"]["type"] = 7; }, {"model.type", "wanted a string", "the number 7"}},
    {[](json& f) { f["model"]["dropout"] = 0.1; }, {"model.dropout", "0.1"}},
    {[](json& f) { f["model"]["byte_fallback"] = true; }, {"model.byte_fallback", "not implemented"}},
    {[](json& f) { f["model"]["fuse_unk"] = "yes"; }, {"model.fuse_unk", "true or false", "\"yes\""}},
    {[](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }, {"model.end_of_word_suffix", "</w>"}},
    {[](json& f) { f["model"]["continuing_subword_prefix"] = "##"; }, {"continuing_subword_prefix", "##"}},
    {[](json& f) { f["model"]["unk_token"] = "nowhere"; },
     {"model.unk_token", "nowhere", "not in the vocab"}},
    {[](json& f) { f["model"]["novelty"] = 1; }, {"model", "novelty"}},
    {[](json& f) { f["model"]["vocab"] = json::array(); }, {"model.vocab", "wanted an object"}},
    {[](json& f) { f["model"]["vocab"] = json::object(); }, {"model.vocab", "no tokens"}},
    {[](json& f) { f["model"]["vocab"]["a"] = -1; }, {"model.vocab[\"a\"]", "-1"}},
    {[](json& f) { f["model"]["vocab"]["a"] = INT64_MAX; }, {"model.vocab[\"a\"]", "9223372036854775807"}},
    {[](json& f) { f["model"]["vocab"]["a"] = uint64_t{1} << 63; }, {"model.vocab[\"a\"]"}},
    {[](json& f) { f["model"]["vocab"]["a"] = 2'000'000'000; }, {"model.vocab[\"a\"]", "from 0 to"}},
    {[](json& f) { f["model"]["vocab"]["a"] = 1.5; }, {"model.vocab[\"a\"]", "1.5"}},
    {[](json& f) { f["model"]["vocab"]["a"] = "1"; }, {"model.vocab[\"a\"]", "the string \"1\""}},
    {[](json& f) { f["model"]["vocab"]["a"] = nullptr; }, {"model.vocab[\"a\"]", "null"}},
    {[](json& f) { f["model"]["vocab"]["a"] = 98; }, {"model.vocab", "the id 98", "\"a\"", "\"b\""}},
    {[](json& f) { f["model"]["merges"] = "a b"; }, {"model.merges", "wanted an array"}},
    {[](json& f) { f["model"]["merges"][1] = "a  b"; }, {"model.merges[1]", "one space"}},
    {[](json& f) { f["model"]["merges"][1] = {"a"}; }, {"model.merges[1]", "an array"}},
    {[](json& f) { f["model"]["merges"][1] = 5; }, {"model.merges[1]", "the number 5"}},
    {[](json& f) { f["model"]["merges"][1] = "a nope"; }, {"model.merges[1]", "\"nope\""}},
    {[](json& f) { f["model"]["merges"][1] = "z z"; }, {"model.merges[1]", "\"zz\""}},
    {[](json& f) { f["added_tokens"] = 3; }, {"added_tokens", "wanted an array"}},
    {[](json& f) { f["added_tokens"][0] = 3; }, {"added_tokens[0]", "wanted an object"}},
    {[](json& f) { f["added_tokens"][0].erase("lstrip"); }, {"added_tokens[0].lstrip", "nothing"}},
    {[](json& f) { f["added_tokens"][0]["id"] = -5; }, {"added_tokens[0].id", "-5"}},
    {[](json& f) { f["added_tokens"][0]["id"] = uint64_t{1} << 63; }, {"added_tokens[0].id"}},
    {[](json& f) { f["added_tokens"][0]["content"] = ""; }, {"added_tokens[0].content", "found 0"}},
    {[](json& f) { f["added_tokens"][0]["content"] = std::string(5000, 'a'); }, {"content", "5000"}},
    {[](json& f) { f["added_tokens"].push_back(f["added_tokens"][0]); },
     {"added_tokens[1].id", "two added tokens"}},
    {[](json& f) {
       f["added_tokens"].push_back(f["added_tokens"][0]);
       f["added_tokens"][1]["id"] = 263;
     },
     {"added_tokens[1].content", "twice"}},
    {[](json& f) {
       f["model"]["vocab"]["zz"] = 262;
       f["model"]["vocab"].erase("z");
     },
     {"262", "\"<|end|>\""}},
    {[](json& f) {
       f["normalizer"] = {{"type", "BertNormalizer"}};
     },
     {"normalizer.type", "BertNormalizer"}},
    {[](json& f) { f["normalizer"] = "NFC"; }, {"normalizer", "wanted an object"}},
    {[](json& f) {
       f["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", ""}};
     },
     {"normalizer.pattern", "Regex"}},
    {[](json& f) {
       f["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", ""}};
     },
     {"normalizer.pattern.String", "not empty"}},
    {[](json& f) {
       f["pre_tokenizer"] = {{"type", "Metaspace"}};
     },
     {"pre_tokenizer.type", "Metaspace"}},
    {[](json& f) {
       f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {5}}};
     },
     {"pre_tokenizer.pretokenizers[0]", "the number 5"}},
    {[](json& f) {
       f["pre_tokenizer"] = {{"type", "ByteLevel"}};
     },
     {"pre_tokenizer.add_prefix_space"}},
    {[](json& f) { f["pre_tokenizer"] = regex("(a"); },
     {"pre_tokenizer.pattern.Regex", "\"(a\"", "not closed"}},
    {[](json& f) { f["pre_tokenizer"] = regex("a{3,1}"); }, {"pattern.Regex", "repeat"}},
    {[](json& f) { f["pre_tokenizer"] = regex("(?<=a+)b"); }, {"pattern.Regex", "does not compile"}},
    {[](json& f) { f["pre_tokenizer"] = regex("(a)\\1"); }, {"pattern.Regex", "not implemented", "\\1"}},
    {[](json& f) { f["pre_tokenizer"] = regex("\\p{Klingon}"); }, {"Klingon"}},
    {[](json& f) { f["pre_tokenizer"] = regex("(*UCP)a"); }, {"(*UC"}},
    {[](json& f) { f["pre_tokenizer"] = regex(std::string(40000, 'a')); }, {"40000 bytes"}},
    {[](json& f) { f["pre_tokenizer"] = regex(std::string(1000, '(')); }, {"nested"}},
    {[](json& f) { f["pre_tokenizer"] = regex(std::string(1000, '[')); }, {"nested"}},
    {[](json& f) {
       f["pre_tokenizer"] = regex("a");
       f["pre_tokenizer"]["behavior"] = "Gone";
     },
     {"pre_tokenizer.behavior", "Removed, Isolated", "Gone"}},
    {[](json& f) {
       f["post_processor"] = {{"type", "RobertaProcessing"}};
     },
     {"post_processor.type", "Roberta"}},
    {[](json& f) {
       f["post_processor"] = {{"type", "TemplateProcessing"},
                              {"single", {{{"Sequence", {{"id", "A"}}}}, {{"SpecialToken", {{"id", "S"}}}}}},
                              {"special_tokens", {{"S", {{"ids", {999}}}}}}};
     },
     {"post_processor.special_tokens.S.ids", "999"}},
    {[](json& f) {
       f["post_processor"] = {
           {"type", "TemplateProcessing"}, {"single", json::array()}, {"special_tokens", json::object()}};
     },
     {"post_processor.single", "0 times"}},
    {[](json& f) {
       f["decoder"] = {{"type", "WordPiece"}};
     },
     {"decoder.type", "WordPiece"}},
};

TEST(TokenizerErrors, EachBadFileIsRefusedInOneLine) {
  for (const BadFile& bad : kBadFiles) {
    json file = small_tokenizer();
    bad.change(file);
    Result<Tokenizer> tokenizer = Tokenizer::parse(file.dump(), "t.json");
    ASSERT_FALSE(tokenizer.ok()) << testing::PrintToString(bad.says);
    const std::string& message = tokenizer.status().message();
    EXPECT_EQ(tokenizer.status().code(), ErrorCode::kUser);
    EXPECT_TRUE(message.starts_with("t.json: ")) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 400U) << message;
    for (const std::string& part : bad.says)
      EXPECT_NE(message.find(part), std::string::npos) << message << " / " << part;
  }
}

TEST(TokenizerErrors, TextThatIsNotJson) {
  for (std::string text :
       {std::string(), std::string("{"), std::string("{\"model\": nope}"), std::string("\xff\xfe"),
        std::string("{\"a\":\"\\ud800\"}"), std::string(3, '\0'), std::string("[1e999]")}) {
    Result<Tokenizer> tokenizer = Tokenizer::parse(text, "t.json");
    ASSERT_FALSE(tokenizer.ok());
    EXPECT_NE(tokenizer.status().message().find("t.json: not JSON"), std::string::npos)
        << tokenizer.status().message();
  }
}

TEST(TokenizerErrors, DeepAndWideJson) {
  Result<Tokenizer> deep = Tokenizer::parse(std::string(10'000'000, '['), "t.json");
  ASSERT_FALSE(deep.ok());
  EXPECT_NE(deep.status().message().find("nested more than 64"), std::string::npos);
  std::string many(20'000'000, ',');
  many.front() = '[';
  Result<Tokenizer> wide = Tokenizer::parse(many, "t.json");
  ASSERT_FALSE(wide.ok());
  EXPECT_NE(wide.status().message().find("more than 16000000 values"), std::string::npos);
}

TEST(TokenizerErrors, AMissingFileIsNamed) {
  Result<Tokenizer> tokenizer = Tokenizer::load(FileSystem::posix(), "/nowhere");
  ASSERT_FALSE(tokenizer.ok());
  EXPECT_NE(tokenizer.status().message().find("/nowhere/tokenizer.json"), std::string::npos);
}

TEST(TokenizerErrors, NormalizationThatGrowsBeyondMeasure) {
  json file = small_tokenizer();
  file["normalizer"] = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(100000, 'b')}};
  Result<Tokenizer> tokenizer = Tokenizer::parse(file.dump(), "t.json");
  ASSERT_TRUE(tokenizer.ok());
  Result<std::vector<int32_t>> ids = tokenizer->encode(std::string(100000, 'a'));
  ASSERT_FALSE(ids.ok());
  EXPECT_NE(ids.status().message().find("normalization"), std::string::npos);
}

}  // namespace
}  // namespace nibble
