#include "text/decoder.h"

namespace nibble {
namespace {

// Goes through nested Sequences, as deep as JSON may be (kMaxJsonDepth). Every decoder joins what it gets,
// so that one after another sees a single token.
Status collect(const JsonObject& part, Decoding& decoding) {  // NOLINT(misc-no-recursion)
  NIBBLE_ASSIGN_OR_RETURN(std::string type, part.string("type"));
  if (type == "Sequence") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "decoders"}));
    NIBBLE_ASSIGN_OR_RETURN(const Json* parts, part.array("decoders"));
    if (decoding == Decoding::kSpaced && parts->empty()) decoding = Decoding::kConcatenated;
    for (size_t i = 0; i < parts->size(); ++i) {
      NIBBLE_ASSIGN_OR_RETURN(
          JsonObject inner, JsonObject::from((*parts)[i], fmt::format("{}[{}]", part.where("decoders"), i)));
      NIBBLE_RETURN_IF_ERROR(collect(inner, decoding));
    }
  } else if (type == "Fuse") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type"}));
    if (decoding == Decoding::kSpaced) decoding = Decoding::kConcatenated;
  } else if (type == "ByteLevel") {
    // Its options are for the pre-tokenizer of the same name and change nothing here.
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
    if (decoding != Decoding::kSpaced)
      return user_error("{}: ByteLevel after another decoder is not implemented", part.where("type"));
    decoding = Decoding::kByteLevel;
  } else {
    return user_error("{}: the decoder {} is not implemented (ByteLevel, Fuse, Sequence are)",
                      part.where("type"), in_quotes(type));
  }
  return {};
}

}  // namespace

Result<Decoding> parse_decoder(const Json* part, const std::string& where) {
  Decoding decoding = Decoding::kSpaced;
  if (part != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(JsonObject object, JsonObject::from(*part, where));
    NIBBLE_RETURN_IF_ERROR(collect(object, decoding));
  }
  return decoding;
}

}  // namespace nibble
