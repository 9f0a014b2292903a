// Cuts text into the pieces that BPE merges within: the `pre_tokenizer` part of tokenizer.json.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "text/json_fields.h"
#include "text/regex.h"

namespace nibble {

// A text and its pieces, in order. Bytes in no piece are gone.
struct Pieces {
  std::string text;
  std::vector<TextRange> ranges;
};

// Immutable after parsing; safe for concurrent use.
class PreTokenizer {
 public:
  // Null for a missing part: one piece.
  static Result<PreTokenizer> parse(const Json* part, const std::string& where);

  // REQUIRES valid UTF-8.
  Status apply(Pieces& pieces, RegexScratch& scratch) const;

 private:
  // What becomes of a match of the pattern; the text between is always kept.
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Split {
    Regex regex;
    Behavior behavior;
    bool invert;  // the text between matches counts as the match
  };
  struct ByteLevel {
    bool add_prefix_space;
    std::optional<Regex> regex;
  };
  struct Digits {
    bool individual;
  };
  using Step = std::variant<Split, ByteLevel, Digits>;
  struct Part {
    TextRange range;
    bool is_match;
  };

  Status add_steps(const JsonObject& part);
  static Result<Split> parse_split(const JsonObject& part);
  static Result<ByteLevel> parse_byte_level(const JsonObject& part);
  static Status split(const Regex& regex, Behavior behavior, bool invert, Pieces& pieces,
                      RegexScratch& scratch);
  static void split_digits(const Digits& digits, Pieces& pieces);
  static Status apply_byte_level(const ByteLevel& step, Pieces& pieces, RegexScratch& scratch);
  // Appends the pieces that the parts of one piece make.
  static void merge_parts(const std::vector<Part>& parts, Behavior behavior, std::vector<TextRange>& out);

  std::vector<Step> steps_;
};

}  // namespace nibble
