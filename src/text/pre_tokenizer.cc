#include "text/pre_tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "text/byte_level.h"
#include "text/unicode_age.h"
#include "text/utf8.h"

namespace nibble {
namespace {

// The pattern of GPT-2: contractions, letters, numbers and the rest, each with a space in front, and spaces.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Rust's char::is_numeric: Nd, Nl, No.
bool is_number(Utf8Character character, std::string_view look_alike) {
  if (is_number_newer_than_16(character.code)) return true;
  auto category = utf8proc_category(static_cast<utf8proc_int32_t>(first_character(look_alike).code));
  return category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
         category == UTF8PROC_CATEGORY_NO;
}

}  // namespace

Result<PreTokenizer> PreTokenizer::parse(const Json* part, const std::string& where) {
  PreTokenizer pre_tokenizer;
  if (part == nullptr) return pre_tokenizer;
  NIBBLE_ASSIGN_OR_RETURN(JsonObject object, JsonObject::from(*part, where));
  NIBBLE_RETURN_IF_ERROR(pre_tokenizer.add_steps(object));
  return pre_tokenizer;
}

// Recursion over Sequence is as deep as JSON may be (kMaxJsonDepth).
Status PreTokenizer::add_steps(const JsonObject& part) {  // NOLINT(misc-no-recursion)
  NIBBLE_ASSIGN_OR_RETURN(std::string type, part.string("type"));
  if (type == "Sequence") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "pretokenizers"}));
    NIBBLE_ASSIGN_OR_RETURN(const Json* parts, part.array("pretokenizers"));
    for (size_t i = 0; i < parts->size(); ++i) {
      NIBBLE_ASSIGN_OR_RETURN(
          JsonObject inner,
          JsonObject::from((*parts)[i], fmt::format("{}[{}]", part.where("pretokenizers"), i)));
      NIBBLE_RETURN_IF_ERROR(add_steps(inner));
    }
  } else if (type == "Split") {
    NIBBLE_ASSIGN_OR_RETURN(Split step, parse_split(part));
    steps_.emplace_back(std::move(step));
  } else if (type == "ByteLevel") {
    NIBBLE_ASSIGN_OR_RETURN(ByteLevel step, parse_byte_level(part));
    steps_.emplace_back(std::move(step));
  } else if (type == "Digits") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "individual_digits"}));
    NIBBLE_ASSIGN_OR_RETURN(bool individual, part.boolean("individual_digits"));
    steps_.emplace_back(Digits{individual});
  } else {
    return user_error("{}: the pre-tokenizer {} is not implemented (Split, ByteLevel, Digits, Sequence are)",
                      part.where("type"), in_quotes(type));
  }
  return {};
}

Result<PreTokenizer::Split> PreTokenizer::parse_split(const JsonObject& part) {
  static constexpr std::pair<const char*, Behavior> kBehaviors[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "pattern", "behavior", "invert"}));
  NIBBLE_ASSIGN_OR_RETURN(std::string name, part.string("behavior"));
  const auto* behavior = std::find_if(std::begin(kBehaviors), std::end(kBehaviors),
                                      [&](const auto& b) { return name == b.first; });
  if (behavior == std::end(kBehaviors)) {
    return part.wrong("behavior", "one of Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous");
  }
  NIBBLE_ASSIGN_OR_RETURN(bool invert, part.boolean("invert"));
  NIBBLE_ASSIGN_OR_RETURN(JsonObject pattern, part.object("pattern"));
  bool is_regex = pattern.find("Regex") != nullptr;
  NIBBLE_RETURN_IF_ERROR(pattern.refuse_others({is_regex ? "Regex" : "String"}));
  NIBBLE_ASSIGN_OR_RETURN(std::string text, pattern.string(is_regex ? "Regex" : "String"));
  Result<Regex> regex = is_regex ? Regex::compile(text) : Regex::compile_literal(text);
  if (!regex.ok()) {
    return regex.status().with_context(
        fmt::format("{}: {}", pattern.where(is_regex ? "Regex" : "String"), in_quotes(text)));
  }
  return Split{std::move(regex).value(), behavior->second, invert};
}

Result<PreTokenizer::ByteLevel> PreTokenizer::parse_byte_level(const JsonObject& part) {
  NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
  NIBBLE_ASSIGN_OR_RETURN(bool add_prefix_space, part.boolean("add_prefix_space"));
  NIBBLE_ASSIGN_OR_RETURN(bool use_regex, part.boolean("use_regex", true));
  ByteLevel step{add_prefix_space, std::nullopt};
  if (use_regex) {
    NIBBLE_ASSIGN_OR_RETURN(step.regex, Regex::compile(kGpt2Pattern));
  }
  return step;
}

Status PreTokenizer::apply(Pieces& pieces, RegexScratch& scratch) const {
  for (const Step& step : steps_) {
    if (const auto* split_step = std::get_if<Split>(&step)) {
      NIBBLE_RETURN_IF_ERROR(
          split(split_step->regex, split_step->behavior, split_step->invert, pieces, scratch));
    } else if (const auto* byte_level = std::get_if<ByteLevel>(&step)) {
      NIBBLE_RETURN_IF_ERROR(apply_byte_level(*byte_level, pieces, scratch));
    } else {
      split_digits(std::get<Digits>(step), pieces);
    }
  }
  return {};
}

void PreTokenizer::merge_parts(const std::vector<Part>& parts, Behavior behavior,
                               std::vector<TextRange>& out) {
  size_t first = out.size();  // the pieces of this text start here
  bool previous_is_match = false;
  switch (behavior) {
    case Behavior::kRemoved:
      for (const Part& part : parts) {
        if (!part.is_match) out.push_back(part.range);
      }
      break;
    case Behavior::kIsolated:
      for (const Part& part : parts) out.push_back(part.range);
      break;
    case Behavior::kMergedWithPrevious:
    case Behavior::kContiguous:
      for (const Part& part : parts) {
        bool joins = behavior == Behavior::kContiguous ? part.is_match == previous_is_match
                                                       : part.is_match && !previous_is_match;
        if (joins && out.size() > first) {
          out.back().end = part.range.end;
        } else {
          out.push_back(part.range);
        }
        previous_is_match = part.is_match;
      }
      break;
    case Behavior::kMergedWithNext:
      for (size_t i = parts.size(); i-- > 0;) {
        if (parts[i].is_match && !previous_is_match && out.size() > first) {
          out.back().begin = parts[i].range.begin;
        } else {
          out.push_back(parts[i].range);
        }
        previous_is_match = parts[i].is_match;
      }
      std::reverse(out.begin() + static_cast<std::ptrdiff_t>(first), out.end());
      break;
  }
  auto is_empty = [](const TextRange& range) { return range.begin == range.end; };
  out.erase(std::remove_if(out.begin() + static_cast<std::ptrdiff_t>(first), out.end(), is_empty), out.end());
}

Status PreTokenizer::split(const Regex& regex, Behavior behavior, bool invert, Pieces& pieces,
                           RegexScratch& scratch) {
  std::string look_alike = older_look_alike(pieces.text);
  std::vector<TextRange> out, matches;
  std::vector<Part> parts;
  for (const TextRange& piece : pieces.ranges) {
    std::string_view text = std::string_view(look_alike).substr(piece.begin, piece.end - piece.begin);
    NIBBLE_RETURN_IF_ERROR(regex.find_all(text, scratch, matches));
    parts.clear();
    size_t done = 0;
    for (const TextRange& match : matches) {
      if (done != match.begin) parts.push_back({{piece.begin + done, piece.begin + match.begin}, invert});
      parts.push_back({{piece.begin + match.begin, piece.begin + match.end}, !invert});
      done = match.end;
    }
    if (done != text.size()) parts.push_back({{piece.begin + done, piece.end}, invert});
    merge_parts(parts, behavior, out);
  }
  pieces.ranges = std::move(out);
  return {};
}

void PreTokenizer::split_digits(const Digits& digits, Pieces& pieces) {
  std::string look_alike = older_look_alike(pieces.text);
  std::string_view text = pieces.text;
  std::vector<TextRange> out;
  for (const TextRange& piece : pieces.ranges) {
    bool previous_is_number = false;
    for (size_t at = piece.begin; at < piece.end;) {
      Utf8Character character = first_character(text.substr(at));
      bool number = is_number(character, std::string_view(look_alike).substr(at));
      bool joins = at > piece.begin && number == previous_is_number && !(number && digits.individual);
      if (joins) {
        out.back().end += character.size_bytes;
      } else {
        out.push_back({at, at + character.size_bytes});
      }
      previous_is_number = number;
      at += character.size_bytes;
    }
  }
  pieces.ranges = std::move(out);
}

Status PreTokenizer::apply_byte_level(const ByteLevel& step, Pieces& pieces, RegexScratch& scratch) {
  if (step.add_prefix_space) {
    Pieces spaced;
    for (const TextRange& piece : pieces.ranges) {
      size_t begin = spaced.text.size();
      if (pieces.text[piece.begin] != ' ') spaced.text += ' ';
      spaced.text.append(pieces.text, piece.begin, piece.end - piece.begin);
      spaced.ranges.push_back({begin, spaced.text.size()});
    }
    pieces = std::move(spaced);
  }
  if (step.regex.has_value())
    NIBBLE_RETURN_IF_ERROR(split(*step.regex, Behavior::kIsolated, false, pieces, scratch));
  Pieces mapped;
  mapped.text.reserve(2 * pieces.text.size());
  mapped.ranges.reserve(pieces.ranges.size());
  for (const TextRange& piece : pieces.ranges) {
    size_t begin = mapped.text.size();
    append_byte_level(std::string_view(pieces.text).substr(piece.begin, piece.end - piece.begin),
                      mapped.text);
    mapped.ranges.push_back({begin, mapped.text.size()});
  }
  pieces = std::move(mapped);
  return {};
}

}  // namespace nibble
