// Byte-level BPE as Hugging Face's tokenizer.json describes it, id for id what the `tokenizers` package
// (0.22) gives. tests/python/tokenizer_test.py holds it to that.
//
// What differs, on purpose:
// - A character that is in no token, where there is no unk_token, is an error; the package drops it.
// - Truncation and padding in the file are ignored (transformers resets them, too).
// - Version 0.23 of the package decodes a `normalized` added token as its normalized spelling, and then no
//   longer knows it as special; here, as in 0.22, a token decodes as it is spelled.
// - Regular expressions: pattern.h says what is refused and what little differs. Scripts other than eight
//   are refused; Unicode versions are bridged (unicode_age.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "text/gguf_vocabulary.h"

namespace nibble {

struct EncodeOptions {
  // Added tokens that are marked special are recognized inside the text. Off for text from a user that must
  // not be able to spell control tokens.
  bool parse_special = true;
  // What the post-processor adds around a sequence (bos, eos).
  bool add_special = true;
};

// Immutable after loading; safe for concurrent use.
class Tokenizer {
 public:
  // Reads DIRECTORY/tokenizer.json, of at most 256 MiB. A part that is not implemented is refused by name,
  // and so is a key that is not known. Ids may be at most 65535 more than twice the number of tokens.
  static Result<Tokenizer> load(const FileSystem& files, const std::string& directory);
  // The same from text; `name` stands for the file in messages.
  static Result<Tokenizer> parse(std::string_view tokenizer_json, const std::string& name);

  // From a GGUF file's vocabulary; ids are the file's own. Refused by name: another model than gpt2 and
  // llama, a `pre` that is not known, a token that is there twice or is not UTF-8, ids outside the
  // vocabulary. Control and unknown tokens are special; user-defined ones are found in any text. What a
  // tokenizer.json would say beyond that is not in the file (lstrip, rstrip, single_word).
  static Result<Tokenizer> from_gguf(const GgufVocabulary& vocabulary);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Invalid UTF-8 in `text` is read as U+FFFD, as `bytes.decode(errors="replace")` in Python would. Errors: a
  // text of more than 64 MiB, a character in no token, a regular expression that takes too long.
  Result<std::vector<int32_t>> encode(std::string_view text, const EncodeOptions& options = {}) const;

  // The bytes of the ids, one after the other: what comes out may end inside a character (Utf8Stream
  // mends that). Ids outside the vocabulary give nothing. With a file that has no decoder, tokens come with
  // spaces between, as the package joins them.
  std::string decode_bytes(std::span<const int32_t> ids, bool skip_special) const;
  // As the `tokenizers` package decodes: bytes that are no UTF-8 become U+FFFD. Where encode puts a space
  // before the text (GGUF's add_space_prefix), one at the beginning goes; decode_bytes keeps it, since it
  // cannot know where a text begins.
  std::string decode(std::span<const int32_t> ids, bool skip_special) const;

  // One more than the largest id.
  int32_t vocab_size() const;
  // The id of a token by its exact spelling in the vocabulary or among the added tokens.
  std::optional<int32_t> token_id(std::string_view token) const;
  bool is_special(int32_t id) const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace nibble
