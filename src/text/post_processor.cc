#include "text/post_processor.h"

#include <optional>
#include <utility>

namespace nibble {
namespace {

// The ids that a template's special token stands for.
Result<std::vector<int32_t>> template_ids(const JsonObject& special_tokens, const std::string& token,
                                          int32_t id_end) {
  if (special_tokens.find(token) == nullptr)
    return user_error("{}: the template's token {} is missing", special_tokens.where(), in_quotes(token));
  NIBBLE_ASSIGN_OR_RETURN(JsonObject entry, special_tokens.object(token));
  NIBBLE_ASSIGN_OR_RETURN(const Json* values, entry.array("ids"));
  std::vector<int32_t> ids;
  for (const Json& value : *values) {
    std::optional<int32_t> id = index_below(value, id_end);
    if (!id.has_value()) {
      return user_error("{}: wanted ids from 0 to {}, found {}", entry.where("ids"), id_end - 1,
                        describe(value));
    }
    ids.push_back(*id);
  }
  return ids;
}

Result<PostProcessor> parse_template(const JsonObject& part, int32_t id_end) {
  NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "single", "pair", "special_tokens"}));
  NIBBLE_ASSIGN_OR_RETURN(const Json* single, part.array("single"));
  NIBBLE_ASSIGN_OR_RETURN(JsonObject special_tokens, part.object("special_tokens"));
  PostProcessor processor;
  int sequences = 0;
  for (size_t i = 0; i < single->size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(JsonObject piece,
                            JsonObject::from((*single)[i], fmt::format("{}[{}]", part.where("single"), i)));
    NIBBLE_RETURN_IF_ERROR(piece.refuse_others({"Sequence", "SpecialToken"}));
    if (piece.find("Sequence") != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(JsonObject sequence, piece.object("Sequence"));
      NIBBLE_ASSIGN_OR_RETURN(std::string id, sequence.string("id"));
      if (id != "A") return sequence.wrong("id", "A, the only sequence of `single`");
      ++sequences;
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(JsonObject special, piece.object("SpecialToken"));
    NIBBLE_ASSIGN_OR_RETURN(std::string id, special.string("id"));
    NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, template_ids(special_tokens, id, id_end));
    std::vector<int32_t>& side = sequences == 0 ? processor.before : processor.after;
    side.insert(side.end(), ids.begin(), ids.end());
  }
  if (sequences != 1)
    return user_error("{}: wanted the sequence A once, found it {} times", part.where("single"), sequences);
  return processor;
}

// Goes through nested Sequences, as deep as JSON may be (kMaxJsonDepth).
Status collect(const JsonObject& part, int32_t id_end,  // NOLINT(misc-no-recursion)
               std::optional<PostProcessor>& found) {
  NIBBLE_ASSIGN_OR_RETURN(std::string type, part.string("type"));
  if (type == "Sequence") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "processors"}));
    NIBBLE_ASSIGN_OR_RETURN(const Json* parts, part.array("processors"));
    for (size_t i = 0; i < parts->size(); ++i) {
      NIBBLE_ASSIGN_OR_RETURN(
          JsonObject inner,
          JsonObject::from((*parts)[i], fmt::format("{}[{}]", part.where("processors"), i)));
      NIBBLE_RETURN_IF_ERROR(collect(inner, id_end, found));
    }
  } else if (type == "TemplateProcessing") {
    if (found.has_value())
      return user_error("{}: a second TemplateProcessing is not implemented", part.where("type"));
    NIBBLE_ASSIGN_OR_RETURN(found, parse_template(part, id_end));
  } else if (type != "ByteLevel") {
    return user_error(
        "{}: the post-processor {} is not implemented (TemplateProcessing, ByteLevel, Sequence are)",
        part.where("type"), in_quotes(type));
  }
  return {};
}

}  // namespace

Result<PostProcessor> PostProcessor::parse(const Json* part, const std::string& where, int32_t id_end) {
  std::optional<PostProcessor> found;
  if (part != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(JsonObject object, JsonObject::from(*part, where));
    NIBBLE_RETURN_IF_ERROR(collect(object, id_end, found));
  }
  return found.value_or(PostProcessor{});
}

}  // namespace nibble
