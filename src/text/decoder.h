// How tokens become text: the `decoder` part of tokenizer.json.
#pragma once

#include <string>

#include "base/result.h"
#include "text/json_fields.h"

namespace nibble {

enum class Decoding {
  kSpaced,        // no decoder: the tokens' spelling, with spaces between
  kConcatenated,  // Fuse, or an empty Sequence: the tokens' spelling
  kByteLevel,     // the bytes that the byte-level alphabet stands for
};

// Null for a missing part. ByteLevel, Fuse, and Sequence of these with ByteLevel first.
Result<Decoding> parse_decoder(const Json* part, const std::string& where);

}  // namespace nibble
