#include "text/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>

#include "base/log.h"
#include "text/unicode_age.h"
#include "text/utf8.h"

namespace nibble {
namespace {

// What \w of Rust's regex crate matches: Alphabetic, M, Nd, Pc, Join_Control.
bool is_word_character(std::string_view character) {
  std::string older = older_look_alike(character);
  char32_t code = first_character(older).code;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Join_Control, and the letters of category So: circled and squared Latin.
      return code == 0x200C || code == 0x200D || (code >= 0x24B6 && code <= 0x24E9) ||
             (code >= 0x1F130 && code <= 0x1F149) || (code >= 0x1F150 && code <= 0x1F169) ||
             (code >= 0x1F170 && code <= 0x1F189);
  }
}

// White_Space.
bool is_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
         code == 0x205F || code == 0x3000;
}

size_t without_space_at_end(std::string_view text) {
  while (!text.empty()) {
    Utf8Character character = last_character(text);
    if (!is_space(character.code)) break;
    text.remove_suffix(character.size_bytes);
  }
  return text.size();
}

size_t space_at_start(std::string_view text) {
  size_t size = 0;
  while (size < text.size()) {
    Utf8Character character = first_character(text.substr(size));
    if (!is_space(character.code)) break;
    size += character.size_bytes;
  }
  return size;
}

// True where the characters on both sides of text[begin, end) are not of a word.
bool stands_alone(std::string_view text, size_t begin, size_t end) {
  if (begin > 0) {
    size_t size = last_character(text.substr(0, begin)).size_bytes;
    if (is_word_character(text.substr(begin - size, size))) return false;
  }
  if (end == text.size()) return true;
  return !is_word_character(text.substr(end, first_character(text.substr(end)).size_bytes));
}

uint64_t edge_key(size_t node, char byte) {
  return static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(byte);
}

}  // namespace

void PatternTrie::insert(std::string_view pattern, int32_t value) {
  NIBBLE_CHECK(!pattern.empty());
  size_t node = 0;
  for (char byte : pattern) {
    const uint64_t* next = edges_.find(edge_key(node, byte));
    if (next != nullptr) {
      node = *next;
      continue;
    }
    edges_.insert_or_assign(edge_key(node, byte), values_.size());
    node = values_.size();
    values_.push_back(kNoValue);
  }
  if (values_[node] == kNoValue) values_[node] = value;
}

std::optional<PatternTrie::Match> PatternTrie::longest_prefix(std::string_view text) const {
  std::optional<Match> longest;
  size_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const uint64_t* next = edges_.find(edge_key(node, text[i]));
    if (next == nullptr) break;
    node = *next;
    if (values_[node] != kNoValue) longest = Match{i + 1, values_[node]};
  }
  return longest;
}

Result<AddedTokens> AddedTokens::parse(const JsonObject& file, const Bpe& bpe, const Normalizer& normalizer) {
  AddedTokens added;
  if (file.find("added_tokens") == nullptr) return added;
  NIBBLE_ASSIGN_OR_RETURN(const Json* parts, file.array("added_tokens"));
  for (size_t i = 0; i < parts->size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(
        JsonObject part, JsonObject::from((*parts)[i], fmt::format("{}[{}]", file.where("added_tokens"), i)));
    NIBBLE_RETURN_IF_ERROR(added.add(part, bpe));
  }
  NIBBLE_RETURN_IF_ERROR(added.build_tries(normalizer, file.where("added_tokens")));
  return added;
}

Result<AddedTokens> AddedTokens::from_tokens(std::vector<AddedToken> tokens, const Normalizer& normalizer,
                                             const std::string& where) {
  AddedTokens added;
  for (const AddedToken& token : tokens) {
    if (token.content.size() > kMaxAddedTokenBytes) {
      return user_error("{}: the added token {} has {} bytes, more than {}", where, token.id,
                        token.content.size(), kMaxAddedTokenBytes);
    }
    added.id_of_content_.emplace(token.content, token.id);
  }
  added.tokens_ = std::move(tokens);
  NIBBLE_RETURN_IF_ERROR(added.build_tries(normalizer, where));
  return added;
}

Status AddedTokens::build_tries(const Normalizer& normalizer, const std::string& where) {
  // Where two tokens are looked for by the same text, special ones go first, then the earlier in the file.
  for (bool special : {true, false}) {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const AddedToken& token = tokens_[i];
      if (token.special != special) continue;
      std::string pattern = token.content;
      if (token.normalized) {
        NIBBLE_ASSIGN_OR_RETURN(pattern, normalizer.apply(token.content));
        if (pattern.empty()) {
          return user_error("{}[{}].content: {} is empty when normalized", where, i,
                            in_quotes(token.content));
        }
      }
      (token.normalized ? normalized_ : plain_).insert(pattern, static_cast<int32_t>(i));
    }
  }
  return {};
}

Status AddedTokens::add(const JsonObject& part, const Bpe& bpe) {
  NIBBLE_RETURN_IF_ERROR(
      part.refuse_others({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}));
  AddedToken token;
  NIBBLE_ASSIGN_OR_RETURN(token.content, part.string("content"));
  NIBBLE_ASSIGN_OR_RETURN(token.single_word, part.boolean("single_word"));
  NIBBLE_ASSIGN_OR_RETURN(token.lstrip, part.boolean("lstrip"));
  NIBBLE_ASSIGN_OR_RETURN(token.rstrip, part.boolean("rstrip"));
  NIBBLE_ASSIGN_OR_RETURN(token.normalized, part.boolean("normalized"));
  NIBBLE_ASSIGN_OR_RETURN(token.special, part.boolean("special"));
  const Json* id = part.find("id");
  std::optional<int32_t> stated = id == nullptr ? std::nullopt : index_below(*id, INT32_MAX);
  if (!stated.has_value()) return part.wrong("id", "an id (0 or more, below 2^31)");
  if (!stated_ids_.insert(*stated).second)
    return user_error("{}: the id {} belongs to two added tokens", part.where("id"), *stated);
  if (token.content.empty() || token.content.size() > kMaxAddedTokenBytes) {
    return user_error("{}: wanted 1 to {} bytes, found {}", part.where("content"), kMaxAddedTokenBytes,
                      token.content.size());
  }
  if (id_of_content_.contains(token.content))
    return user_error("{}: {} is there twice", part.where("content"), in_quotes(token.content));

  if (std::optional<int32_t> known = bpe.token_id(token.content); known.has_value()) {
    token.id = *known;
  } else {
    int32_t next = bpe.token_count();
    if (largest_id_.has_value() && *largest_id_ >= next) next = *largest_id_ + 1;
    token.id = next;
    if (const std::string* taken = bpe.token(next); taken != nullptr) {
      return user_error("{}: {} would get the id {}, which {} of the vocabulary has", part.where("id"),
                        in_quotes(token.content), next, in_quotes(*taken));
    }
  }
  if (token.id != *stated) {
    log_warning("{}: {} has the id {} in the file, but gets {}, as in the tokenizers package",
                part.where("id"), in_quotes(token.content), *stated, token.id);
  }
  largest_id_ = std::max(largest_id_.value_or(0), token.id);
  id_of_content_.emplace(token.content, token.id);
  tokens_.push_back(std::move(token));
  return {};
}

std::optional<int32_t> AddedTokens::token_id(std::string_view content) const {
  auto found = id_of_content_.find(std::string(content));
  if (found == id_of_content_.end()) return std::nullopt;
  return found->second;
}

void AddedTokens::split(std::string_view text, bool is_normalized, bool parse_special,
                        std::vector<Segment>& out) const {
  const PatternTrie& trie = is_normalized ? normalized_ : plain_;
  size_t done = 0;  // text before this is in a segment
  for (size_t at = 0; at < text.size();) {
    std::optional<PatternTrie::Match> match = trie.longest_prefix(text.substr(at));
    if (!match.has_value()) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(match->value)];
    size_t begin = at, end = at + match->size_bytes;
    at = end;  // also where the match does not count: no token is looked for inside another one
    if (token.special && !parse_special) continue;
    if (token.single_word && !stands_alone(text, begin, end)) continue;
    if (token.lstrip) begin = std::max(without_space_at_end(text.substr(0, begin)), done);
    if (token.rstrip) end += space_at_start(text.substr(end));
    if (done < begin) out.push_back({{done, begin}, std::nullopt});
    out.push_back({{begin, end}, token.id});
    done = end;
  }
  if (done < text.size()) out.push_back({{done, text.size()}, std::nullopt});
}

}  // namespace nibble
