// Filters that give text or numbers.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "text/jinja_filters.h"
#include "text/jinja_unicode.h"

namespace nibble::jinja {
namespace {

// ---- case, trim, escape

Value same_kind(Runtime& runtime, const Value& input, std::string text) {
  return runtime.string(std::move(text), input.is(Kind::kString) && input.string().markup);
}

template <std::string (*Change)(std::string_view)>
Value change(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("this filter", args, "", 0);
  return same_kind(runtime, input, Change(to_str(runtime, input)));
}

// Unlike str.title: a word begins behind a dash, a space or an opening bracket.
std::string title_words(std::string_view text) {
  std::string out;
  size_t begin = 0;
  const auto word = [&](size_t end) {
    if (begin == end) return;
    size_t first = begin;
    next_code_point(text, first);
    out += to_upper(text.substr(begin, first - begin));
    out += to_lower(text.substr(first, end - first));
  };
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    if (!is_space(c) &&
        (c >= 0x80 || std::string_view("-({[<").find(static_cast<char>(c)) == std::string_view::npos)) {
      continue;
    }
    word(at);
    out += text.substr(at, i - at);
    begin = i;
  }
  word(text.size());
  return out;
}

Value trim(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("trim", args, "chars", 0);
  const Value text = input.is(Kind::kString) ? input : runtime.string(to_str(runtime, input));
  Args chars;
  if (bound[0]) chars.positional.push_back(*bound[0]);
  return call(runtime, *find_method(runtime, text, "strip"), chars);
}

Value center(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("center", args, "width", 0);
  const Value text = input.is(Kind::kString) ? input : runtime.string(to_str(runtime, input));
  Args width;
  width.positional.push_back(bound[0].value_or(Value(int64_t{80})));
  return call(runtime, *find_method(runtime, text, "center"), width);
}

Value to_string(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("string", args, "", 0);
  return input.is(Kind::kString) ? input : runtime.string(to_str(runtime, input));
}
Value mark_safe(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("safe", args, "", 0);
  return runtime.string(to_str(runtime, input), true);
}
Value escape(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("escape", args, "", 0);
  if (input.is(Kind::kString) && input.string().markup) return input;
  return runtime.string(escape_html(to_str(runtime, input)), true);
}
Value force_escape(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("forceescape", args, "", 0);
  return runtime.string(escape_html(to_str(runtime, input)), true);
}

Value replace(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("replace", args, "old new count", 2);
  const auto count = without_none(bound[2]);
  return runtime.string(replace_all(runtime, to_str(runtime, input), to_str(runtime, *bound[0]),
                                    to_str(runtime, *bound[1]),
                                    count ? int_argument(*count, "replace: count") : -1));
}

Value format(Runtime& runtime, const Value& input, const Args& args) {
  if (!args.positional.empty() && !args.named.empty()) {
    fail("format cannot handle positional and keyword arguments at the same time");
  }
  Value values = runtime.tuple(args.positional);
  if (!args.named.empty()) {
    Dict* dict = runtime.dict();
    for (const auto& [name, value] : args.named) dict->set(runtime, runtime.string(name), value);
    values = Value(Kind::kDict, dict);
  }
  return runtime.string(percent_format(runtime, to_str(runtime, input), values));
}

Value indent(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("indent", args, "width first blank", 0);
  reject_undefined(input);
  std::string text = string_argument(input, "indent: its input");
  std::string indention = "    ";
  if (bound[0] && bound[0]->is(Kind::kString)) {
    indention = bound[0]->text();
  } else if (bound[0]) {
    const int64_t width = int_argument(*bound[0], "indent: width");
    if (width > runtime.limits.max_output_bytes) fail("indent: the width is too large");
    indention = std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  }
  text += '\n';
  runtime.step_bytes(text.size());
  const std::vector<std::string_view> lines = split_lines(text);
  std::string out = flag(bound[1]) ? indention : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i > 0 && (flag(bound[2]) || !lines[i].empty())) out += indention;
    out += lines[i];
    if (static_cast<int64_t>(out.size()) > runtime.limits.max_output_bytes) {
      fail("indent gives more than {} bytes", runtime.limits.max_output_bytes);
    }
  }
  return same_kind(runtime, input, std::move(out));
}

Value truncate(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("truncate", args, "length killwords end leeway", 0);
  const int64_t length = bound[0] ? int_argument(*bound[0], "truncate: length") : 255;
  const std::string end = bound[2] ? string_argument(*bound[2], "truncate: end") : "...";
  const auto leeway_value = without_none(bound[3]);
  const int64_t leeway = leeway_value ? int_argument(*leeway_value, "truncate: leeway") : 5;
  const int64_t end_length = count_code_points(end);
  if (length < end_length) fail("truncate: expected length >= {}, got {}", end_length, length);
  if (leeway < 0) fail("truncate: expected leeway >= 0, got {}", leeway);
  const auto input_length = length_of(input);
  if (!input_length) fail("truncate: object of type '{}' has no len()", type_name(input));
  if (*input_length - leeway <= length) return input;
  const std::string& text = string_argument(input, "truncate: its input");
  std::string kept = text.substr(0, byte_offset(text, length - end_length));
  if (!flag(bound[1])) kept = kept.substr(0, kept.rfind(' '));
  return runtime.string(kept + end);
}

Value word_count(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("wordcount", args, "", 0);
  const std::string text = to_str(runtime, input);
  int64_t words = 0;
  bool inside = false;
  for (size_t i = 0; i < text.size();) {
    const bool word = is_word(next_code_point(text, i));
    words += word && !inside ? 1 : 0;
    inside = word;
  }
  return Value(words);
}

std::string quote_url(std::string_view text, bool for_query) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '_' || c == '.' || c == '-' || c == '~' || (c == '/' && !for_query);
    if (plain) {
      out += c;
    } else if (c == ' ' && for_query) {
      out += '+';
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

Value url_encode(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("urlencode", args, "", 0);
  const bool iterable = !input.is(Kind::kString) && (length_of(input) || input.is(Kind::kIterator));
  if (!iterable) return runtime.string(quote_url(to_str(runtime, input), false));
  std::string out;
  Args none;
  const Value pairs =
      input.is(Kind::kDict) ? call(runtime, *find_method(runtime, input, "items"), none) : input;
  for (const Value& pair : to_vector(runtime, pairs)) {
    const std::vector<Value> parts = to_vector(runtime, pair);
    if (parts.size() != 2) fail("urlencode: a pair has {} parts", parts.size());
    if (!out.empty()) out += '&';
    out += quote_url(to_str(runtime, parts[0]), true) + "=" + quote_url(to_str(runtime, parts[1]), true);
  }
  return runtime.string(std::move(out));
}

Value to_json_filter(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("tojson", args, "ensure_ascii indent separators sort_keys", 0);
  JsonStyle style;
  style.ensure_ascii = flag(bound[0]);
  style.sort_keys = flag(bound[3]);
  if (const auto indent = without_none(bound[1])) {
    style.item_separator = ",";
    if (indent->is(Kind::kString)) {
      style.indent = indent->text();
    } else {
      const int64_t width = int_argument(*indent, "tojson: indent");
      if (width > runtime.limits.max_output_bytes) fail("tojson: the indent is too large");
      style.indent = std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
    }
  }
  if (const auto separators = without_none(bound[2])) {
    const std::vector<Value> parts = to_vector(runtime, *separators);
    if (parts.size() != 2) fail("tojson: separators must be two strings");
    style.item_separator = string_argument(parts[0], "tojson: a separator");
    style.key_separator = string_argument(parts[1], "tojson: a separator");
  }
  return runtime.string(to_json(runtime, input, style));
}

// ---- numbers

// Python's int(text, base): white space around, a sign, single underscores between digits, a prefix of the
// base. Nothing where it is no such number.
std::optional<int64_t> parse_int(std::string_view text, int64_t base) {
  text = strip_right(strip_left(text));
  const bool negative = text.starts_with('-');
  if (text.starts_with('-') || text.starts_with('+')) text.remove_prefix(1);
  if (base != 0 && (base < 2 || base > 36)) return std::nullopt;
  const auto prefix = [&](char letter, int64_t prefix_base) {
    const bool there = text.size() > 1 && text[0] == '0' && (text[1] | 0x20) == letter;
    if (!there || (base != 0 && base != prefix_base)) return;
    base = prefix_base;
    text.remove_prefix(2);
    if (text.starts_with('_')) text.remove_prefix(1);
  };
  prefix('x', 16);
  prefix('o', 8);
  prefix('b', 2);
  if (base == 0) base = 10;
  std::string digits = negative ? "-" : "";
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_') {
      if (i == 0 || i + 1 == text.size() || text[i - 1] == '_') return std::nullopt;
      continue;
    }
    digits += text[i];
  }
  int64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, value, static_cast<int>(base));
  if (parsed.ptr != end || text.empty()) return std::nullopt;
  if (parsed.ec == std::errc::result_out_of_range) fail("an integer does not fit 64 bits");
  return parsed.ec == std::errc() ? std::optional(value) : std::nullopt;
}

std::optional<double> parse_float(std::string_view text) {
  text = strip_right(strip_left(text));
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_digit_at = [&](size_t at) {
      return at < text.size() && text[at] >= '0' && text[at] <= '9';
    };
    if (text[i] == '_') {
      if (i == 0 || !is_digit_at(i - 1) || !is_digit_at(i + 1)) return std::nullopt;
      continue;
    }
    digits += static_cast<char>(text[i] >= 'A' && text[i] <= 'Z' ? text[i] | 0x20 : text[i]);
  }
  const std::string_view bare = std::string_view(digits).substr(digits.find_first_of("+-") == 0 ? 1 : 0);
  const bool word = bare == "inf" || bare == "infinity" || bare == "nan";
  if (!word && (bare.empty() || bare.find_first_not_of("0123456789.e+-") != std::string_view::npos))
    return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(digits.c_str(), &end);
  return end == digits.c_str() + digits.size() ? std::optional(value) : std::nullopt;
}

int64_t whole_part(double value) {
  if (!(std::fabs(value) < 9.2e18)) fail("an integer does not fit 64 bits");
  return static_cast<int64_t>(value);
}

Value to_int(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("int", args, "default base", 0);
  const Value otherwise = bound[0].value_or(Value(int64_t{0}));
  reject_undefined(input);
  if (input.is_integer()) return Value(input.as_int());
  if (input.is(Kind::kFloat))
    return std::isnan(input.as_float()) ? otherwise : Value(whole_part(input.as_float()));
  if (!input.is(Kind::kString)) return otherwise;
  if (const auto number = parse_int(input.text(), bound[1] ? int_argument(*bound[1], "int: base") : 10)) {
    return Value(*number);
  }
  const auto real = parse_float(input.text());
  return real && std::isfinite(*real) ? Value(whole_part(*real)) : otherwise;
}

Value to_float(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("float", args, "default", 0);
  reject_undefined(input);
  if (input.is_number()) return Value(input.as_float());
  if (input.is(Kind::kString)) {
    if (const auto number = parse_float(input.text())) return Value(*number);
  }
  return bound[0].value_or(Value(0.0));
}

Value absolute(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("abs", args, "", 0);
  if (input.is(Kind::kFloat)) return Value(std::fabs(input.as_float()));
  reject_undefined(input);
  if (!input.is_integer()) fail("bad operand type for abs(): '{}'", type_name(input));
  return input.as_int() < 0 ? negate(input) : Value(input.as_int());
}

double round_half_even(double value, int64_t precision) {
  if (!std::isfinite(value) || precision > 308) return value;
  if (precision < -308) return std::copysign(0.0, value);
  if (precision >= 0) {  // printf rounds the exact value, as Python does
    return std::strtod(fmt::format("{:.{}f}", value, static_cast<int>(precision)).c_str(), nullptr);
  }
  const double scale = std::pow(10.0, static_cast<double>(-precision));
  return std::nearbyint(value / scale) * scale;
}

Value round_int(int64_t value, int64_t precision) {
  if (precision >= 0) return Value(value);
  if (precision < -18) return Value(int64_t{0});
  int64_t scale = 1;
  for (; precision < 0; ++precision) scale *= 10;
  const int64_t rest = ((value % scale) + scale) % scale;
  const int64_t low = value - rest;
  const bool up = rest * 2 > scale || (rest * 2 == scale && (low / scale) % 2 != 0);
  int64_t out = low;
  if (up && __builtin_add_overflow(low, scale, &out)) fail("an integer does not fit 64 bits");
  return Value(out);
}

Value round_number(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("round", args, "precision method", 0);
  const int64_t precision = bound[0] ? int_argument(*bound[0], "round: precision") : 0;
  const std::string method = bound[1] ? string_argument(*bound[1], "round: method") : "common";
  if (method != "common" && method != "ceil" && method != "floor")
    fail("round: method must be common, ceil or floor");
  if (!input.is_number()) {
    reject_undefined(input);
    fail("round: its input is no number but a '{}'", type_name(input));
  }
  if (method == "common") {
    if (input.is_integer()) return round_int(input.as_int(), precision);
    return Value(round_half_even(input.as_float(), precision));
  }
  const Value scale = binary(runtime, Operator::kPow, Value(int64_t{10}), Value(precision));
  const double scaled = binary(runtime, Operator::kMul, input, scale).as_float();
  const int64_t whole = whole_part(method == "ceil" ? std::ceil(scaled) : std::floor(scaled));
  return binary(runtime, Operator::kDiv, Value(whole), scale);
}

constexpr NamedFilter kFilters[] = {
    {"abs", absolute},
    {"capitalize", change<capitalize>},
    {"center", center},
    {"e", escape},
    {"escape", escape},
    {"float", to_float},
    {"forceescape", force_escape},
    {"format", format},
    {"indent", indent},
    {"int", to_int},
    {"lower", change<to_lower>},
    {"replace", replace},
    {"round", round_number},
    {"safe", mark_safe},
    {"string", to_string},
    {"title", change<title_words>},
    {"tojson", to_json_filter},
    {"trim", trim},
    {"truncate", truncate},
    {"upper", change<to_upper>},
    {"urlencode", url_encode},
    {"wordcount", word_count},
};

}  // namespace

Filter find_text_filter(std::string_view name) {
  for (const NamedFilter& entry : kFilters) {
    if (entry.name == name) return entry.filter;
  }
  return nullptr;
}

Filter find_filter(std::string_view name) {
  if (const Filter filter = find_text_filter(name)) return filter;
  if (const Filter filter = find_sequence_filter(name)) return filter;
  return find_select_filter(name);
}

}  // namespace nibble::jinja
