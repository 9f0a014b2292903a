// From the metadata of a GGUF file to a tokenizer.
#pragma once

#include "base/result.h"
#include "checkpoint/gguf_metadata.h"
#include "text/gguf_vocabulary.h"
#include "text/tokenizer.h"

namespace nibble {

// The tokenizer.ggml.* keys as they are; keys that are there with another type, and those that would change
// the tokenizer and are not implemented, are errors. Ids that the file does not state are those that its
// model means: of "llama" bos 1, eos 2 and unknown 0.
Result<GgufVocabulary> read_gguf_vocabulary(const GgufMetadata& metadata);

Result<Tokenizer> load_gguf_tokenizer(const GgufMetadata& metadata);

}  // namespace nibble
