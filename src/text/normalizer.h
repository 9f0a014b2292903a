// The `normalizer` part of tokenizer.json: NFC, NFD, NFKC, NFKD, Replace (of a string), Prepend, Lowercase,
// Sequence.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "text/json_fields.h"

namespace nibble {

// Immutable after parsing; safe for concurrent use.
class Normalizer {
 public:
  // Null for a missing part: text stays as it is.
  static Result<Normalizer> parse(const Json* part, const std::string& where);

  // An error where the text would grow beyond all measure. REQUIRES valid UTF-8; gives valid UTF-8.
  Result<std::string> apply(std::string text) const;

 private:
  struct Unicode {
    bool compose;        // NFC, NFKC
    bool compatibility;  // NFKC, NFKD
  };
  struct Replace {
    std::string from, to;
  };
  struct Prepend {
    std::string prefix;
  };
  struct Lowercase {};
  using Step = std::variant<Unicode, Replace, Prepend, Lowercase>;

  Status add_steps(const JsonObject& part);

  std::vector<Step> steps_;
};

}  // namespace nibble
