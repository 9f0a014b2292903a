// Tokenizer::from_gguf: the parts that a tokenizer.json would describe, made from a GGUF vocabulary.
#include <utility>

#include "base/log.h"
#include "text/gguf_pre_tokenizers.h"
#include "text/gguf_vocabulary.h"
#include "text/json_fields.h"
#include "text/tokenizer.h"
#include "text/tokenizer_impl.h"
#include "text/utf8.h"

namespace nibble {
namespace {

std::string where(const GgufVocabulary& vocabulary, const std::string& key) {
  return fmt::format("{}: tokenizer.ggml.{}", vocabulary.name, key);
}

Status check(const GgufVocabulary& vocabulary) {
  const size_t count = vocabulary.tokens.size();
  if (count == 0) return user_error("{}: no tokens", where(vocabulary, "tokens"));
  if (count > INT32_MAX)
    return user_error("{}: {} tokens, beyond 31 bits", where(vocabulary, "tokens"), count);
  if (!vocabulary.types.empty() && vocabulary.types.size() != count) {
    return user_error("{}: wanted one for each of {} tokens, found {}", where(vocabulary, "token_type"),
                      count, vocabulary.types.size());
  }
  for (size_t id = 0; id < count; ++id) {
    const std::string& token = vocabulary.tokens[id];
    if (repair_utf8(token) != token)
      return user_error("{}[{}]: {} is not UTF-8", where(vocabulary, "tokens"), id, in_quotes(token));
  }
  const std::pair<const char*, std::optional<int32_t>> ids[] = {{"bos_token_id", vocabulary.bos},
                                                                {"eos_token_id", vocabulary.eos},
                                                                {"eot_token_id", vocabulary.eot},
                                                                {"eom_token_id", vocabulary.eom},
                                                                {"unknown_token_id", vocabulary.unknown}};
  for (const auto& [key, id] : ids) {
    if (id.has_value() && (*id < 0 || static_cast<size_t>(*id) >= count))
      return user_error("{}: wanted an id from 0 to {}, found {}", where(vocabulary, key), count - 1, *id);
  }
  return {};
}

// The tokens that are looked for in text as they are.
std::vector<AddedToken> added_token_list(const GgufVocabulary& vocabulary) {
  std::vector<AddedToken> added;
  for (size_t id = 0; id < vocabulary.types.size(); ++id) {
    const GgufTokenType type = vocabulary.types[id];
    const bool special = type == GgufTokenType::kControl || type == GgufTokenType::kUnknown;
    if ((!special && type != GgufTokenType::kUserDefined) || vocabulary.tokens[id].empty()) continue;
    added.push_back({.content = vocabulary.tokens[id], .id = static_cast<int32_t>(id), .special = special});
  }
  return added;
}

Result<AddedTokens> added_tokens(const GgufVocabulary& vocabulary, const Normalizer& normalizer) {
  return AddedTokens::from_tokens(added_token_list(vocabulary), normalizer, where(vocabulary, "tokens"));
}

Result<PostProcessor> post_processor(const GgufVocabulary& vocabulary, bool adds_bos) {
  PostProcessor processor;
  if (vocabulary.add_bos.value_or(adds_bos)) {
    if (vocabulary.bos.has_value()) {
      processor.before.push_back(*vocabulary.bos);
    } else if (vocabulary.add_bos.has_value()) {
      return user_error("{}: is true, but there is no bos_token_id", where(vocabulary, "add_bos_token"));
    }
  }
  if (vocabulary.add_eos.value_or(false)) {
    if (!vocabulary.eos.has_value())
      return user_error("{}: is true, but there is no eos_token_id", where(vocabulary, "add_eos_token"));
    processor.after.push_back(*vocabulary.eos);
  }
  return processor;
}

// The `model` part of a tokenizer.json.
Result<Json> bpe_json(const GgufVocabulary& vocabulary, bool ignore_merges) {
  Json vocab = Json::object();
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string& token = vocabulary.tokens[id];
    if (token.empty()) continue;  // an id of no token
    const auto [at, is_new] = vocab.emplace(token, id);
    if (!is_new) {
      return user_error("{}[{}]: {} is also token {}", where(vocabulary, "tokens"), id, in_quotes(token),
                        at->get<size_t>());
    }
  }
  Json merges = Json::array();
  for (size_t i = 0; i < vocabulary.merges.size(); ++i) {
    const std::string& merge = vocabulary.merges[i];
    // A token of the byte-level alphabet has no space in it; the left one has at least one character.
    const size_t space = merge.find(' ', 1);
    if (space == std::string::npos || repair_utf8(merge) != merge) {
      return user_error("{}[{}]: wanted two tokens with a space between, found {}",
                        where(vocabulary, "merges"), i, in_quotes(merge));
    }
    merges.push_back(Json::array({merge.substr(0, space), merge.substr(space + 1)}));
  }
  return Json{{"type", "BPE"},
              {"ignore_merges", ignore_merges},
              {"vocab", std::move(vocab)},
              {"merges", std::move(merges)}};
}

// Of pre-tokenizer and decoder.
Json byte_level_json() {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
}

Json pre_tokenizer_json(const GgufPreTokenizer& pre) {
  Json steps = Json::array();
  for (const std::string& pattern : pre.patterns) {
    steps.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  }
  steps.push_back(byte_level_json());
  return {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}};
}

// Of the model "gpt2".
Result<const GgufPreTokenizer*> pre_tokenizer_of(const GgufVocabulary& vocabulary) {
  if (vocabulary.model != "gpt2") {
    return user_error("{}: {} is not implemented (gpt2 and llama are)", where(vocabulary, "model"),
                      in_quotes(vocabulary.model));
  }
  const std::string pre_name = vocabulary.pre.empty() ? "default" : vocabulary.pre;
  const GgufPreTokenizer* pre = find_gguf_pre_tokenizer(pre_name);
  if (pre == nullptr) {
    return user_error("{}: {} is not implemented ({} are)", where(vocabulary, "pre"), in_quotes(pre_name),
                      gguf_pre_tokenizer_names());
  }
  if (vocabulary.pre.empty())
    log_warning("{}: is missing; text may be cut otherwise than the model knows it",
                where(vocabulary, "pre"));
  return pre;
}

// GGUF's spelling of a space in the tokens of SentencePiece.
Json space_normalizer_json(bool adds_space) {
  Json steps = Json::array();
  if (adds_space) steps.push_back({{"type", "Prepend"}, {"prepend", "\u2581"}});
  steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}});
  return {{"type", "Sequence"}, {"normalizers", std::move(steps)}};
}

// A token that steers the model must not be spelled by text that may not steer it.
void warn_of_spelled_tokens(const Tokenizer& tokenizer, const GgufVocabulary& vocabulary) {
  for (size_t id = 0; id < vocabulary.types.size(); ++id) {
    if (vocabulary.types[id] != GgufTokenType::kControl) continue;
    const auto ids = tokenizer.encode(vocabulary.tokens[id], {.parse_special = false, .add_special = false});
    if (ids.ok() && *ids == std::vector<int32_t>{static_cast<int32_t>(id)}) {
      log_warning("{}[{}]: plain text can spell the control token {}", where(vocabulary, "tokens"), id,
                  in_quotes(vocabulary.tokens[id]));
    }
  }
}

}  // namespace

Result<std::string> gguf_tokenizer_json(const GgufVocabulary& vocabulary) {
  NIBBLE_RETURN_IF_ERROR(check(vocabulary));
  if (vocabulary.model == "llama") {
    return user_error("{}: {} has no tokenizer.json that gives the same ids", where(vocabulary, "model"),
                      in_quotes(vocabulary.model));
  }
  NIBBLE_ASSIGN_OR_RETURN(const GgufPreTokenizer* pre, pre_tokenizer_of(vocabulary));
  NIBBLE_ASSIGN_OR_RETURN(Json model, bpe_json(vocabulary, pre->ignore_merges));
  Json added = Json::array();
  for (const AddedToken& token : added_token_list(vocabulary)) {
    added.push_back({{"id", token.id},
                     {"content", token.content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", token.special}});
  }
  NIBBLE_ASSIGN_OR_RETURN(const PostProcessor around, post_processor(vocabulary, pre->add_bos));
  Json single = Json::array(), special = Json::object();
  const auto add = [&](int32_t id) {
    const std::string& token = vocabulary.tokens[static_cast<size_t>(id)];
    single.push_back({{"SpecialToken", {{"id", token}, {"type_id", 0}}}});
    special[token] = {{"id", token}, {"ids", {id}}, {"tokens", {token}}};
  };
  for (int32_t id : around.before) add(id);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  for (int32_t id : around.after) add(id);
  Json pair = single;
  pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
  const Json json = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", std::move(added)},
                     {"normalizer", pre->nfc ? Json{{"type", "NFC"}} : Json()},
                     {"pre_tokenizer", pre_tokenizer_json(*pre)},
                     {"post_processor",
                      {{"type", "TemplateProcessing"},
                       {"single", std::move(single)},
                       {"pair", std::move(pair)},
                       {"special_tokens", std::move(special)}}},
                     {"decoder", byte_level_json()},
                     {"model", std::move(model)}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<Tokenizer> Tokenizer::from_gguf(const GgufVocabulary& vocabulary) {
  NIBBLE_RETURN_IF_ERROR(check(vocabulary));
  if (vocabulary.model == "llama") {
    const bool adds_space = vocabulary.add_space_prefix.value_or(true);
    const Json spaces = space_normalizer_json(adds_space);
    NIBBLE_ASSIGN_OR_RETURN(Normalizer normalizer, Normalizer::parse(&spaces, vocabulary.name));
    NIBBLE_ASSIGN_OR_RETURN(SentencePiece model, SentencePiece::create(vocabulary));
    NIBBLE_ASSIGN_OR_RETURN(AddedTokens added, added_tokens(vocabulary, normalizer));
    auto impl = std::make_unique<Impl>(Impl{.model = std::move(model),
                                            .added = std::move(added),
                                            .normalizer = std::move(normalizer),
                                            .pre_tokenizer = {},
                                            .decoding = Decoding::kConcatenated,
                                            .strips_first_space = adds_space});
    NIBBLE_ASSIGN_OR_RETURN(impl->post_processor, ::nibble::post_processor(vocabulary, true));
    impl->index_tokens();
    return Tokenizer(std::move(impl));
  }
  NIBBLE_ASSIGN_OR_RETURN(const GgufPreTokenizer* pre, pre_tokenizer_of(vocabulary));
  NIBBLE_ASSIGN_OR_RETURN(const Json model_json, bpe_json(vocabulary, pre->ignore_merges));
  NIBBLE_ASSIGN_OR_RETURN(const JsonObject model, JsonObject::from(model_json, vocabulary.name));
  NIBBLE_ASSIGN_OR_RETURN(Bpe bpe, Bpe::parse(model));
  const Json nfc = {{"type", "NFC"}};
  NIBBLE_ASSIGN_OR_RETURN(Normalizer normalizer,
                          Normalizer::parse(pre->nfc ? &nfc : nullptr, where(vocabulary, "pre")));
  const Json steps = pre_tokenizer_json(*pre);
  NIBBLE_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::parse(&steps, where(vocabulary, "pre")));
  NIBBLE_ASSIGN_OR_RETURN(AddedTokens added, added_tokens(vocabulary, normalizer));
  auto impl = std::make_unique<Impl>(Impl{.model = std::move(bpe),
                                          .added = std::move(added),
                                          .normalizer = std::move(normalizer),
                                          .pre_tokenizer = std::move(pre_tokenizer),
                                          .decoding = Decoding::kByteLevel});
  NIBBLE_ASSIGN_OR_RETURN(impl->post_processor, ::nibble::post_processor(vocabulary, pre->add_bos));
  impl->index_tokens();
  Tokenizer tokenizer(std::move(impl));
  warn_of_spelled_tokens(tokenizer, vocabulary);
  return tokenizer;
}

}  // namespace nibble
