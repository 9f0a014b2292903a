// The tokenizer that a GGUF file carries, as plain data: what tokenizer.ggml.* says (docs/formats-gguf.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace nibble {

enum class GgufTokenType {
  kUndefined = 0,
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,  // of model "llama": spelled <0x0A>
};

struct GgufVocabulary {
  std::string name;                  // of the file, for messages
  std::string model;                 // "gpt2": byte-level BPE by merges; "llama": SentencePiece's, by scores
  std::string pre;                   // of "gpt2": how text is cut into pieces; empty where it is not said
  std::vector<std::string> tokens;   // by id
  std::vector<GgufTokenType> types;  // one for each token, or none: all are normal
  std::vector<float> scores;         // of "llama": one for each token, the highest merges first
  std::vector<std::string> merges;   // of "gpt2": "left right", the first merges first
  std::optional<int32_t> bos, eos, eot, eom, unknown;
  std::optional<bool> add_bos, add_eos, add_space_prefix;  // none: as model and pre have it
};

// The tokenizer.json of the same tokenizer; an error for "llama", of which there is none that gives the same
// ids.
Result<std::string> gguf_tokenizer_json(const GgufVocabulary& vocabulary);

}  // namespace nibble
