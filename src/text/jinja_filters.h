// What the files of filters share.
#pragma once

#include "text/jinja_value.h"

namespace nibble::jinja {

struct NamedFilter {
  std::string_view name;
  Filter filter;
};

// jinja_filters_text.cc, jinja_filters_sequence.cc, jinja_filters_select.cc
Filter find_text_filter(std::string_view name);
Filter find_sequence_filter(std::string_view name);
Filter find_select_filter(std::string_view name);

// "a.0.b" -> the item a of a value, of that the item 0, of that the item b. With `fallback`, an undefined
// part becomes it.
class AttributePath {
 public:
  AttributePath() = default;
  AttributePath(Runtime& runtime, const Value& path);
  Value get(Runtime& runtime, Value item, const std::optional<Value>& fallback = std::nullopt) const;

 private:
  std::vector<Value> parts_;
};

// The key by which filters compare: strings in lower case unless `case_sensitive`.
Value compare_key(Runtime& runtime, const Value& value, bool case_sensitive);

inline std::optional<Value> without_none(const std::optional<Value>& value) {
  return value && value->is(Kind::kNone) ? std::nullopt : value;
}
inline bool flag(const std::optional<Value>& value) { return value && truthy(*value); }

}  // namespace nibble::jinja
