// Python's str methods. Positions count code points.
#include <algorithm>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {

using Method = Value (*)(Runtime&, const Value& self, const Args&);
Method find_string_method(std::string_view name);

namespace {

bool is_markup(const Value& self) { return self.string().markup; }

Value like(Runtime& runtime, const Value& self, std::string_view text) {
  return runtime.string(std::string(text), is_markup(self));
}

// ---- strip

std::string_view strip_chars(std::string_view text, std::string_view chars, bool left, bool right) {
  const auto in_chars = [&](std::string_view c) {
    for (size_t i = 0; i < chars.size();) {
      const size_t begin = i;
      next_code_point(chars, i);
      if (chars.substr(begin, i - begin) == c) return true;
    }
    return false;
  };
  while (left && !text.empty()) {
    size_t end = 0;
    next_code_point(text, end);
    if (!in_chars(text.substr(0, end))) break;
    text = text.substr(end);
  }
  while (right && !text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!in_chars(text.substr(begin))) break;
    text = text.substr(0, begin);
  }
  return text;
}

Value strip_sides(Runtime& runtime, const Value& self, const Args& args, bool left, bool right) {
  const auto bound = bind_args("strip()", args, "chars", 0);
  std::string_view text = self.text();
  if (bound[0] && !bound[0]->is(Kind::kNone)) {
    const std::string& chars = string_argument(*bound[0], "strip(): chars");
    // Each end is looked up in chars: bounded work, charged as if all of the text went.
    runtime.step(static_cast<int64_t>((text.size() / 64 + 1) * (chars.size() / 64 + 1)));
    return like(runtime, self, strip_chars(text, chars, left, right));
  }
  if (left) text = strip_left(text);
  if (right) text = strip_right(text);
  return like(runtime, self, text);
}
Value strip(Runtime& runtime, const Value& self, const Args& args) {
  return strip_sides(runtime, self, args, true, true);
}
Value lstrip(Runtime& runtime, const Value& self, const Args& args) {
  return strip_sides(runtime, self, args, true, false);
}
Value rstrip(Runtime& runtime, const Value& self, const Args& args) {
  return strip_sides(runtime, self, args, false, true);
}

// ---- split

struct SplitArguments {
  std::optional<std::string> separator;  // none: white space
  int64_t max = -1;
};
SplitArguments split_arguments(const Args& args) {
  const auto bound = bind_args("split()", args, "sep maxsplit", 0);
  SplitArguments out;
  if (bound[0] && !bound[0]->is(Kind::kNone)) {
    out.separator = string_argument(*bound[0], "split(): sep");
    if (out.separator->empty()) fail("split(): empty separator");
  }
  if (bound[1]) out.max = int_argument(*bound[1], "split(): maxsplit");
  return out;
}

Value pieces_of(Runtime& runtime, const Value& self, const std::vector<std::string_view>& pieces) {
  std::vector<Value> out;
  out.reserve(pieces.size());
  for (const std::string_view piece : pieces) out.push_back(like(runtime, self, piece));
  return runtime.list(std::move(out));
}

std::vector<std::string_view> split_words(std::string_view text, int64_t max) {
  std::vector<std::string_view> out;
  for (text = strip_left(text); !text.empty(); text = strip_left(text)) {
    if (max >= 0 && static_cast<int64_t>(out.size()) == max) {
      out.push_back(text);  // white space at its end stays
      break;
    }
    size_t end = 0;
    for (size_t next = 0; next < text.size(); end = next) {
      if (is_space(next_code_point(text, next))) break;
    }
    out.push_back(text.substr(0, end));
    text = text.substr(end);
  }
  return out;
}

Value split(Runtime& runtime, const Value& self, const Args& args) {
  const SplitArguments how = split_arguments(args);
  std::string_view text = self.text();
  runtime.step_bytes(text.size());
  if (!how.separator) return pieces_of(runtime, self, split_words(text, how.max));
  std::vector<std::string_view> out;
  while (how.max < 0 || static_cast<int64_t>(out.size()) < how.max) {
    const size_t at = text.find(*how.separator);
    if (at == std::string_view::npos) break;
    out.push_back(text.substr(0, at));
    text = text.substr(at + how.separator->size());
    runtime.step();
  }
  out.push_back(text);
  return pieces_of(runtime, self, out);
}

Value rsplit(Runtime& runtime, const Value& self, const Args& args) {
  const SplitArguments how = split_arguments(args);
  std::string_view text = self.text();
  runtime.step_bytes(text.size());
  std::vector<std::string_view> out;
  if (!how.separator) {
    if (how.max < 0) return split(runtime, self, args);
    for (text = strip_right(text); !text.empty(); text = strip_right(text)) {
      if (static_cast<int64_t>(out.size()) == how.max) {
        out.push_back(text);
        break;
      }
      size_t begin = text.size();
      while (begin > 0) {
        size_t previous = begin - 1;
        while (previous > 0 && (static_cast<unsigned char>(text[previous]) & 0xC0) == 0x80) --previous;
        size_t position = previous;
        if (is_space(next_code_point(text, position))) break;
        begin = previous;
      }
      out.push_back(text.substr(begin));
      text = text.substr(0, begin);
    }
  } else {
    while (how.max < 0 || static_cast<int64_t>(out.size()) < how.max) {
      const size_t at = text.rfind(*how.separator);
      if (at == std::string_view::npos) break;
      out.push_back(text.substr(at + how.separator->size()));
      text = text.substr(0, at);
      runtime.step();
    }
    out.push_back(text);
  }
  std::reverse(out.begin(), out.end());
  return pieces_of(runtime, self, out);
}

Value splitlines(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("splitlines()", args, "keepends", 0);
  runtime.step_bytes(self.text().size());
  std::vector<std::string_view> lines = split_lines(self.text());
  if (bound[0] && truthy(*bound[0])) {
    const std::string& text = self.text();
    for (size_t i = 0; i < lines.size(); ++i) {
      const char* end = i + 1 < lines.size() ? lines[i + 1].data() : text.data() + text.size();
      lines[i] = {lines[i].data(), static_cast<size_t>(end - lines[i].data())};
    }
  }
  return pieces_of(runtime, self, lines);
}

Value partition_at(Runtime& runtime, const Value& self, const Args& args, bool last) {
  const auto bound = bind_args("partition()", args, "sep", 1);
  const std::string& separator = string_argument(*bound[0], "partition(): sep");
  if (separator.empty()) fail("partition(): empty separator");
  const std::string_view text = self.text();
  runtime.step_bytes(text.size());
  const size_t at = last ? text.rfind(separator) : text.find(separator);
  std::vector<std::string_view> parts = {text, "", ""};
  if (at != std::string_view::npos) {
    parts = {text.substr(0, at), separator, text.substr(at + separator.size())};
  } else if (last) {
    parts = {"", "", text};
  }
  return {Kind::kTuple, pieces_of(runtime, self, parts).object()};
}
Value partition(Runtime& runtime, const Value& self, const Args& args) {
  return partition_at(runtime, self, args, false);
}
Value rpartition(Runtime& runtime, const Value& self, const Args& args) {
  return partition_at(runtime, self, args, true);
}

// ---- search

struct Window {  // self[start:end], and where it begins
  std::string_view text;
  int64_t start = 0;
  bool valid = true;  // false where start lies behind the end: nothing is found, not even ''
};
Window window_of(Runtime& runtime, const Value& self, const std::optional<Value>& start_value,
                 const std::optional<Value>& end_value) {
  const std::string_view text = self.text();
  const int64_t length = self.string().length;
  const auto position = [&](const std::optional<Value>& value, int64_t fallback) {
    if (!value || value->is(Kind::kNone)) return fallback;
    const int64_t index = int_argument(*value, "a position");
    return index < 0 ? std::max<int64_t>(index + length, 0) : index;
  };
  const int64_t start = position(start_value, 0);
  const int64_t end = std::min(position(end_value, length), length);
  runtime.step_bytes(text.size());
  if (start > end) return {"", start, false};
  const size_t begin = byte_offset(text, start);
  return {text.substr(begin, byte_offset(text, end) - begin), start, true};
}

std::optional<int64_t> position_of(Runtime& runtime, const Value& self, const Args& args, bool last) {
  const auto bound = bind_args("find()", args, "sub start end", 1);
  const std::string& sub = string_argument(*bound[0], "find(): sub");
  const Window window = window_of(runtime, self, bound[1], bound[2]);
  const size_t at = last ? window.text.rfind(sub) : window.text.find(sub);
  if (!window.valid || at == std::string_view::npos) return std::nullopt;
  return window.start + count_code_points(window.text.substr(0, at));
}
Value find(Runtime& runtime, const Value& self, const Args& args) {
  return Value(position_of(runtime, self, args, false).value_or(-1));
}
Value rfind(Runtime& runtime, const Value& self, const Args& args) {
  return Value(position_of(runtime, self, args, true).value_or(-1));
}
Value index_from(Runtime& runtime, const Value& self, const Args& args, bool last) {
  const auto found = position_of(runtime, self, args, last);
  if (!found) fail("substring not found");
  return Value(*found);
}
Value index(Runtime& runtime, const Value& self, const Args& args) {
  return index_from(runtime, self, args, false);
}
Value rindex(Runtime& runtime, const Value& self, const Args& args) {
  return index_from(runtime, self, args, true);
}

Value count(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("count()", args, "sub start end", 1);
  const std::string& sub = string_argument(*bound[0], "count(): sub");
  const Window window = window_of(runtime, self, bound[1], bound[2]);
  if (!window.valid) return Value(int64_t{0});
  if (sub.empty()) return Value(count_code_points(window.text) + 1);
  int64_t found = 0;
  for (size_t at = window.text.find(sub); at != std::string_view::npos;
       at = window.text.find(sub, at + sub.size())) {
    ++found;
  }
  return Value(found);
}

Value has_affix(Runtime& runtime, const Value& self, const Args& args, bool at_end) {
  const std::string_view what = at_end ? "endswith()" : "startswith()";
  const auto bound = bind_args(what, args, "affix start end", 1);
  const Window window = window_of(runtime, self, bound[1], bound[2]);
  std::vector<Value> affixes = {*bound[0]};
  if (bound[0]->is(Kind::kTuple)) affixes = bound[0]->items();
  for (const Value& affix : affixes) {
    const std::string& text = string_argument(affix, what);
    if (window.valid && (at_end ? window.text.ends_with(text) : window.text.starts_with(text)))
      return Value(true);
  }
  return Value(false);
}
Value startswith(Runtime& runtime, const Value& self, const Args& args) {
  return has_affix(runtime, self, args, false);
}
Value endswith(Runtime& runtime, const Value& self, const Args& args) {
  return has_affix(runtime, self, args, true);
}

// ---- change

Value replace(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("replace()", args, "old new count", 2);
  const auto part = [&](const Value& value) {
    const std::string& text = string_argument(value, "replace()");
    return is_markup(self) && !value.string().markup ? escape_html(text) : text;
  };
  const int64_t count = bound[2] ? int_argument(*bound[2], "replace(): count") : -1;
  return like(runtime, self, replace_all(runtime, self.text(), part(*bound[0]), part(*bound[1]), count));
}

Value removeprefix(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("removeprefix()", args, "prefix", 1);
  std::string_view text = self.text();
  const std::string& prefix = string_argument(*bound[0], "removeprefix()");
  if (text.starts_with(prefix)) text.remove_prefix(prefix.size());
  return like(runtime, self, text);
}
Value removesuffix(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("removesuffix()", args, "suffix", 1);
  std::string_view text = self.text();
  const std::string& suffix = string_argument(*bound[0], "removesuffix()");
  if (text.ends_with(suffix)) text.remove_suffix(suffix.size());
  return like(runtime, self, text);
}

template <std::string (*Change)(std::string_view)>
Value changed(Runtime& runtime, const Value& self, const Args& args) {
  bind_args("a method that changes case", args, "", 0);
  runtime.step_bytes(self.text().size());
  return like(runtime, self, Change(self.text()));
}

Value join(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("join()", args, "iterable", 1);
  std::string out;
  bool first = true;
  for (const Value& item : to_vector(runtime, *bound[0])) {
    const std::string& text = string_argument(item, "join(): an item");
    if (!first) out += self.text();
    first = false;
    out += is_markup(self) && !item.string().markup ? escape_html(text) : text;
    runtime.step_bytes(text.size() + self.text().size());
    if (static_cast<int64_t>(out.size()) > runtime.limits.max_output_bytes) {
      fail("join() gives more than {} bytes", runtime.limits.max_output_bytes);
    }
  }
  return like(runtime, self, out);
}

Value format(Runtime& runtime, const Value& self, const Args& args) {
  if (is_markup(self)) fail("format() of an escaped string is not implemented");
  return runtime.string(brace_format(runtime, self.text(), args));
}

Value zfill(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("zfill()", args, "width", 1);
  std::string text = self.text();
  const int64_t missing = int_argument(*bound[0], "zfill(): width") - self.string().length;
  if (missing > runtime.limits.max_output_bytes) fail("zfill(): the width is too large");
  const bool sign = !text.empty() && (text[0] == '+' || text[0] == '-');
  if (missing > 0) text.insert(sign ? 1 : 0, static_cast<size_t>(missing), '0');
  return like(runtime, self, text);
}

Value justify(Runtime& runtime, const Value& self, const Args& args, char side) {
  const auto bound = bind_args("a method that fills", args, "width fillchar", 1);
  const std::string fill = bound[1] ? string_argument(*bound[1], "fillchar") : " ";
  if (count_code_points(fill) != 1) fail("the fill character must be exactly one character long");
  const int64_t width = int_argument(*bound[0], "width");
  if (width > runtime.limits.max_output_bytes / 4) fail("the width {} is too large", width);
  const int64_t missing = std::max<int64_t>(width - self.string().length, 0);
  // Python's center puts the odd one to the left where the width is odd.
  const int64_t left = side == '<' ? 0 : side == '>' ? missing : missing / 2 + (missing & width & 1);
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += self.text();
  for (int64_t i = left; i < missing; ++i) out += fill;
  return like(runtime, self, out);
}
Value ljust(Runtime& runtime, const Value& self, const Args& args) {
  return justify(runtime, self, args, '<');
}
Value rjust(Runtime& runtime, const Value& self, const Args& args) {
  return justify(runtime, self, args, '>');
}
Value center(Runtime& runtime, const Value& self, const Args& args) {
  return justify(runtime, self, args, '^');
}

// ---- questions

template <bool (*Holds)(char32_t)>
Value all_are(Runtime& runtime, const Value& self, const Args& args) {
  bind_args("a method that asks", args, "", 0);
  const std::string& text = self.text();
  runtime.step_bytes(text.size());
  for (size_t i = 0; i < text.size();) {
    if (!Holds(next_code_point(text, i))) return Value(false);
  }
  return Value(!text.empty());
}
bool is_alphanumeric(char32_t c) { return is_letter(c) || is_digit(c) || is_numeric(c); }
bool is_decimal(char32_t c) {
  return is_digit(c) && is_numeric(c) && (c < 0x80 || is_word(c)) && c != 0xB2 && c != 0xB3 && c != 0xB9;
}
bool is_ascii(char32_t c) { return c < 0x80; }

template <bool (*Wanted)(char32_t), bool (*Forbidden)(char32_t)>
Value cased(Runtime& runtime, const Value& self, const Args& args) {
  bind_args("a method that asks", args, "", 0);
  const std::string& text = self.text();
  runtime.step_bytes(text.size());
  bool found = false;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (Forbidden(c) || is_title(c)) return Value(false);
    found |= Wanted(c);
  }
  return Value(found);
}
Value isascii(Runtime& runtime, const Value& self, const Args& args) {
  return Value(self.text().empty() || truthy(all_are<is_ascii>(runtime, self, args)));
}

struct Named {
  std::string_view name;
  Method method;
};
constexpr Named kMethods[] = {
    {"strip", strip},
    {"lstrip", lstrip},
    {"rstrip", rstrip},
    {"split", split},
    {"rsplit", rsplit},
    {"splitlines", splitlines},
    {"partition", partition},
    {"rpartition", rpartition},
    {"startswith", startswith},
    {"endswith", endswith},
    {"find", find},
    {"rfind", rfind},
    {"index", index},
    {"rindex", rindex},
    {"count", count},
    {"replace", replace},
    {"removeprefix", removeprefix},
    {"removesuffix", removesuffix},
    {"lower", changed<to_lower>},
    {"upper", changed<to_upper>},
    {"title", changed<title_case>},
    {"capitalize", changed<capitalize>},
    {"join", join},
    {"format", format},
    {"zfill", zfill},
    {"ljust", ljust},
    {"rjust", rjust},
    {"center", center},
    {"isdigit", all_are<is_digit>},
    {"isdecimal", all_are<is_decimal>},
    {"isnumeric", all_are<is_numeric>},
    {"isalpha", all_are<is_letter>},
    {"isalnum", all_are<is_alphanumeric>},
    {"isspace", all_are<is_space>},
    {"isascii", isascii},
    {"islower", cased<is_lower, is_upper>},
    {"isupper", cased<is_upper, is_lower>},
};

}  // namespace

Method find_string_method(std::string_view name) {
  for (const Named& entry : kMethods) {
    if (entry.name == name) return entry.method;
  }
  return nullptr;
}

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t end = i;
    const char32_t c = next_code_point(text, i);
    if (!is_line_break(c)) continue;
    if (c == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.push_back(text.substr(begin, end - begin));
    begin = i;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::string replace_all(Runtime& runtime, std::string_view text, std::string_view from, std::string_view to,
                        int64_t count) {
  std::string out;
  const auto check = [&] {
    if (static_cast<int64_t>(out.size()) > runtime.limits.max_output_bytes) {
      fail("a replacement gives more than {} bytes", runtime.limits.max_output_bytes);
    }
  };
  runtime.step_bytes(text.size());
  if (from.empty()) {  // between all characters
    size_t i = 0;
    while (count != 0) {
      out += to;
      --count;
      check();
      if (i >= text.size()) return out;
      const size_t begin = i;
      next_code_point(text, i);
      out += text.substr(begin, i - begin);
    }
    return out += text.substr(i);
  }
  while (count != 0) {
    const size_t at = text.find(from);
    if (at == std::string_view::npos) break;
    out += text.substr(0, at);
    out += to;
    text = text.substr(at + from.size());
    --count;
    check();
  }
  return out += text;
}

}  // namespace nibble::jinja
