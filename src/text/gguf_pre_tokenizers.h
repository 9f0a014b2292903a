// The names that tokenizer.ggml.pre can have, each with how it cuts text into pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace nibble {

struct GgufPreTokenizer {
  std::vector<std::string> names;
  // One Split (isolated) after the other, in Oniguruma's dialect (pattern.h).
  std::vector<std::string> patterns;
  bool ignore_merges = false;  // a piece that is a token is that token
  bool add_bos = false;        // where the file does not say
  bool nfc = false;            // the tokenizer of these models composes text first; GGUF does not store that
};

// Null for a name that is in no table of ours.
const GgufPreTokenizer* find_gguf_pre_tokenizer(std::string_view name);
// All names, for a message.
std::string gguf_pre_tokenizer_names();

}  // namespace nibble
