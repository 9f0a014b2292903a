// Tokens that are found in text as they are, before BPE: the `added_tokens` part of tokenizer.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/result.h"
#include "text/bpe.h"
#include "text/flat_map.h"
#include "text/json_fields.h"
#include "text/normalizer.h"
#include "text/regex.h"

namespace nibble {

constexpr size_t kMaxAddedTokenBytes = 1024;  // bounds the search, which is O(text x longest token)

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;  // only where no word character is before or after
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
  bool normalized = false;   // is looked for, normalized, in normalized text
  bool special = false;
};

// A part of a text: an added token, or text between.
struct Segment {
  TextRange range;
  std::optional<int32_t> id;
};

// A set of patterns with the longest match at each place.
class PatternTrie {
 public:
  // The first of equal patterns counts. REQUIRES pattern is not empty.
  void insert(std::string_view pattern, int32_t value);
  struct Match {
    size_t size_bytes;
    int32_t value;
  };
  // The longest pattern that `text` starts with.
  std::optional<Match> longest_prefix(std::string_view text) const;

 private:
  static constexpr int32_t kNoValue = -1;
  FlatMap edges_;                          // node and byte -> node
  std::vector<int32_t> values_{kNoValue};  // by node; node 0 is the root
};

// Immutable after parsing; safe for concurrent use.
class AddedTokens {
 public:
  // Ids are those that the `tokenizers` package gives: the vocabulary's where it has the token, else the next
  // free one; where the file says otherwise a warning names both. An id that is taken is an error.
  static Result<AddedTokens> parse(const JsonObject& file, const Bpe& bpe, const Normalizer& normalizer);

  // Tokens with the ids that they have. REQUIRES each id and each content once, no content empty; `where`
  // stands for their place in messages.
  static Result<AddedTokens> from_tokens(std::vector<AddedToken> tokens, const Normalizer& normalizer,
                                         const std::string& where);

  // Cuts text, or normalized text, at the tokens that are looked for there. Segments of text are never
  // empty. Without `parse_special` special tokens stay text.
  void split(std::string_view text, bool is_normalized, bool parse_special, std::vector<Segment>& out) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }
  std::optional<int32_t> token_id(std::string_view content) const;

 private:
  Status add(const JsonObject& part, const Bpe& bpe);
  Status build_tries(const Normalizer& normalizer, const std::string& where);

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, int32_t> id_of_content_;
  std::optional<int32_t> largest_id_;
  std::unordered_set<int32_t> stated_ids_;  // while parsing: what the file says
  PatternTrie plain_, normalized_;          // values are indices into tokens_
};

}  // namespace nibble
