#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>

#include "text/unicode_age.h"
#include "text/utf8.h"

namespace nibble {
namespace {

// The longest that a normalized text may be; the largest true growth is 11 times (U+FDFA in NFKD).
size_t growth_limit(size_t bytes) { return 32 * bytes + (size_t{1} << 20); }

int combining_class(utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; }

// Decomposes, orders and composes a run of characters, none of them inert, and appends it. utf8proc's own
// ordering is quadratic in the length of a run of marks, so it gets them in order.
void normalize_run(const std::vector<utf8proc_int32_t>& run, bool compose, bool compatibility,
                   std::string& out) {
  auto options =
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                                     (compatibility ? UTF8PROC_COMPAT : 0));
  std::vector<utf8proc_int32_t> codes;
  codes.reserve(run.size());
  for (utf8proc_int32_t code : run) {
    utf8proc_int32_t parts[32];
    int last_class = 0;
    utf8proc_ssize_t count = utf8proc_decompose_char(code, parts, 32, options, &last_class);
    NIBBLE_CHECK(count >= 0 && count <= 32);
    codes.insert(codes.end(), parts, parts + count);
  }
  for (auto begin = codes.begin(); begin != codes.end();) {
    auto is_starter = [](utf8proc_int32_t code) { return combining_class(code) == 0; };
    begin = std::find_if_not(begin, codes.end(), is_starter);
    auto end = std::find_if(begin, codes.end(), is_starter);
    std::stable_sort(begin, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    begin = end;
  }
  auto size = static_cast<utf8proc_ssize_t>(codes.size());
  size = utf8proc_normalize_utf32(codes.data(), size, options);
  NIBBLE_CHECK(size >= 0);
  for (utf8proc_ssize_t i = 0; i < size; ++i) append_utf8(static_cast<char32_t>(codes[i]), out);
}

std::string normalize_unicode(const std::string& text, bool compose, bool compatibility) {
  // Nothing below this changes: ASCII never, and what composes nothing below U+0300.
  char32_t first_that_changes = compose && !compatibility ? 0x300 : 0x80;
  std::string out;
  std::vector<utf8proc_int32_t> run;
  bool changes = false;
  auto finish_run = [&] {
    if (changes) {
      normalize_run(run, compose, compatibility, out);
    } else {
      for (utf8proc_int32_t code : run) append_utf8(static_cast<char32_t>(code), out);
    }
    run.clear();
    changes = false;
  };
  for (std::string_view rest = text; !rest.empty();) {
    Utf8Character character = first_character(rest);
    rest.remove_prefix(character.size_bytes);
    if (is_inert_in_normalization(character.code)) {
      finish_run();
      append_utf8(character.code, out);
      continue;
    }
    changes = changes || character.code >= first_that_changes;
    run.push_back(static_cast<utf8proc_int32_t>(character.code));
  }
  finish_run();
  return out;
}

}  // namespace

Result<Normalizer> Normalizer::parse(const Json* part, const std::string& where) {
  Normalizer normalizer;
  if (part == nullptr) return normalizer;
  NIBBLE_ASSIGN_OR_RETURN(JsonObject object, JsonObject::from(*part, where));
  NIBBLE_RETURN_IF_ERROR(normalizer.add_steps(object));
  return normalizer;
}

// Recursion over Sequence is as deep as JSON may be (kMaxJsonDepth).
Status Normalizer::add_steps(const JsonObject& part) {  // NOLINT(misc-no-recursion)
  NIBBLE_ASSIGN_OR_RETURN(std::string type, part.string("type"));
  if (type == "Sequence") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "normalizers"}));
    NIBBLE_ASSIGN_OR_RETURN(const Json* parts, part.array("normalizers"));
    for (size_t i = 0; i < parts->size(); ++i) {
      NIBBLE_ASSIGN_OR_RETURN(
          JsonObject inner,
          JsonObject::from((*parts)[i], fmt::format("{}[{}]", part.where("normalizers"), i)));
      NIBBLE_RETURN_IF_ERROR(add_steps(inner));
    }
  } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type"}));
    steps_.emplace_back(Unicode{type.back() == 'C', type.size() == 4});
  } else if (type == "Replace") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "pattern", "content"}));
    NIBBLE_ASSIGN_OR_RETURN(JsonObject pattern, part.object("pattern"));
    NIBBLE_RETURN_IF_ERROR(pattern.refuse_others({"String"}));
    NIBBLE_ASSIGN_OR_RETURN(std::string from, pattern.string("String"));
    NIBBLE_ASSIGN_OR_RETURN(std::string to, part.string("content"));
    if (from.empty()) return pattern.wrong("String", "a string that is not empty");
    steps_.emplace_back(Replace{std::move(from), std::move(to)});
  } else if (type == "Prepend") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type", "prepend"}));
    NIBBLE_ASSIGN_OR_RETURN(std::string prefix, part.string("prepend"));
    steps_.emplace_back(Prepend{std::move(prefix)});
  } else if (type == "Lowercase") {
    NIBBLE_RETURN_IF_ERROR(part.refuse_others({"type"}));
    steps_.emplace_back(Lowercase{});
  } else {
    return user_error(
        "{}: the normalizer {} is not implemented (NFC, NFD, NFKC, NFKD, Replace, Prepend, Lowercase, "
        "Sequence are)",
        part.where("type"), in_quotes(type));
  }
  return {};
}

Result<std::string> Normalizer::apply(std::string text) const {
  size_t limit = growth_limit(text.size());
  for (const Step& step : steps_) {
    if (const auto* unicode = std::get_if<Unicode>(&step)) {
      text = normalize_unicode(text, unicode->compose, unicode->compatibility);
    } else if (const auto* replace = std::get_if<Replace>(&step)) {
      std::string out;
      size_t done = 0;
      for (size_t at = 0; (at = text.find(replace->from, done)) != std::string::npos && out.size() <= limit;
           done = at + replace->from.size()) {
        out.append(text, done, at - done);
        out += replace->to;
      }
      out.append(text, done);
      text = std::move(out);
    } else if (const auto* prepend = std::get_if<Prepend>(&step)) {
      if (!text.empty()) text.insert(0, prepend->prefix);
    } else {
      std::string out;
      for (std::string_view rest = text; !rest.empty();) {
        Utf8Character character = first_character(rest);
        append_lowercase(character.code, out);
        rest.remove_prefix(character.size_bytes);
      }
      text = std::move(out);
    }
    if (text.size() > limit) return user_error("normalization makes more than {} bytes of the text", limit);
  }
  return text;
}

}  // namespace nibble
