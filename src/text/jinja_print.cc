// str(), repr() and json.dumps, character for character.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {
namespace {

class Writer {
 public:
  explicit Writer(Runtime& runtime) : runtime_(runtime) {}

  std::string out;

  // Everything that prints goes through here now and then, so that a huge text ends early.
  void check() {
    runtime_.step();
    if (static_cast<int64_t>(out.size()) > runtime_.limits.max_output_bytes) {
      fail("a printed value is longer than {} bytes", runtime_.limits.max_output_bytes);
    }
  }

  void repr(const Value& value) {
    check();
    const Runtime::Level level(runtime_);
    switch (value.kind()) {
      case Kind::kUndefined:
        out += "Undefined";
        return;
      case Kind::kNone:
        out += "None";
        return;
      case Kind::kBool:
        out += value.as_int() != 0 ? "True" : "False";
        return;
      case Kind::kInt:
        out += std::to_string(value.as_int());
        return;
      case Kind::kFloat:
        out += float_repr(value.as_float());
        return;
      case Kind::kString:
        if (value.string().markup) out += "Markup(";
        repr_string(value.text());
        if (value.string().markup) out += ')';
        return;
      case Kind::kList:
      case Kind::kTuple:
        repr_sequence(value);
        return;
      case Kind::kDict:
        repr_dict(value.dict());
        return;
      case Kind::kNamespace:
        out += "<Namespace ";
        repr_dict(value.dict());
        out += '>';
        return;
      case Kind::kView:
        repr_view(value);
        return;
      case Kind::kRange:
        repr_range(value.as<Range>());
        return;
      case Kind::kMacro: {
        const Value& name = value.as<Function>().attributes.at(0).second;
        out += name.is(Kind::kNone) ? "<Macro anonymous>" : fmt::format("<Macro '{}'>", name.text());
        return;
      }

      case Kind::kIterator:
        out += "<generator object>";
        return;
      case Kind::kFunction:
        out += "<function " + value.as<Function>().name + ">";
        return;
      case Kind::kLoop:
        out += "<LoopContext>";
        return;
      case Kind::kCycler:
        out += "<Cycler>";
        return;
    }
  }

 private:
  // Python prints a container inside itself as [...] or {...}.
  bool enter(const Object* object, const char* inside_itself) {
    if (std::find(open_.begin(), open_.end(), object) != open_.end()) {
      out += inside_itself;
      return false;
    }
    open_.push_back(object);
    return true;
  }

  void repr_items(const std::vector<Value>& items) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += ", ";
      repr(items[i]);
    }
  }

  void repr_sequence(const Value& value) {
    const bool list = value.is(Kind::kList);
    if (!enter(value.object(), list ? "[...]" : "(...)")) return;
    out += list ? '[' : '(';
    repr_items(value.items());
    if (!list && value.items().size() == 1) out += ',';
    out += list ? ']' : ')';
    open_.pop_back();
  }

  void repr_dict(const Dict& dict) {
    if (!enter(&dict, "{...}")) return;
    out += '{';
    bool first = true;
    for (const auto& [key, value] : dict.entries) {
      if (!first) out += ", ";
      first = false;
      repr(key);
      out += ": ";
      repr(value);
    }
    out += '}';
    open_.pop_back();
  }

  void repr_view(const Value& value) {
    if (!enter(value.object(), "...")) return;
    out += type_name(value);
    out += "([";
    for (int64_t i = 0; i < *length_of(value); ++i) {
      if (i > 0) out += ", ";
      repr(element(runtime_, value, i));
    }
    out += "])";
    open_.pop_back();
  }

  void repr_range(const Range& range) {
    out += fmt::format("range({}, {}", range.start, range.stop);
    if (range.step != 1) out += fmt::format(", {}", range.step);
    out += ')';
  }

  void repr_string(const std::string& text) {
    runtime_.step_bytes(text.size());
    const bool has_single = text.find('\'') != std::string::npos;
    const char quote = has_single && text.find('"') == std::string::npos ? '"' : '\'';
    out += quote;
    for (size_t i = 0; i < text.size();) {
      const size_t begin = i;
      const char32_t c = next_code_point(text, i);
      if (c == static_cast<unsigned char>(quote) || c == '\\') {
        out += '\\';
        out += static_cast<char>(c);
      } else if (c == '\n') {
        out += "\\n";
      } else if (c == '\r') {
        out += "\\r";
      } else if (c == '\t') {
        out += "\\t";
      } else if (is_printable(c)) {
        out.append(text, begin, i - begin);
      } else if (c < 0x100) {
        out += fmt::format("\\x{:02x}", static_cast<uint32_t>(c));
      } else if (c < 0x10000) {
        out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
      } else {
        out += fmt::format("\\U{:08x}", static_cast<uint32_t>(c));
      }
    }
    out += quote;
  }

  Runtime& runtime_;
  std::vector<const Object*> open_;
};

class JsonWriter {
 public:
  JsonWriter(Runtime& runtime, const JsonStyle& style) : runtime_(runtime), style_(style) {}

  std::string out;

  void write(const Value& value) {
    runtime_.step();
    if (static_cast<int64_t>(out.size()) > runtime_.limits.max_output_bytes) {
      fail("tojson gives more than {} bytes", runtime_.limits.max_output_bytes);
    }
    switch (value.kind()) {
      case Kind::kNone:
        out += "null";
        return;
      case Kind::kBool:
        out += value.as_int() != 0 ? "true" : "false";
        return;
      case Kind::kInt:
        out += std::to_string(value.as_int());
        return;
      case Kind::kFloat:
        out += number(value.as_float());
        return;
      case Kind::kString:
        write_string(value.text());
        return;
      case Kind::kList:
      case Kind::kTuple:
        write_list(value.items());
        return;
      case Kind::kDict:
        write_dict(value.dict());
        return;
      default:
        fail("Object of type {} is not JSON serializable", type_name(value));
    }
  }

 private:
  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return float_repr(value);
  }

  void new_line(int levels) {
    if (!style_.indent) return;
    out += '\n';
    for (int i = 0; i < levels; ++i) {
      out += *style_.indent;
      if (static_cast<int64_t>(out.size()) > runtime_.limits.max_output_bytes) return;  // write() says so
    }
  }

  void write_list(const std::vector<Value>& items) {
    if (items.empty()) {
      out += "[]";
      return;
    }
    const Runtime::Level level(runtime_);
    out += '[';
    ++depth_;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += style_.item_separator;
      new_line(depth_);
      write(items[i]);
    }
    new_line(--depth_);
    out += ']';
  }

  void write_dict(const Dict& dict) {
    if (dict.entries.empty()) {
      out += "{}";
      return;
    }
    const Runtime::Level level(runtime_);
    std::vector<std::pair<Value, Value>> entries = dict.entries;
    runtime_.step(static_cast<int64_t>(entries.size()));
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(),
                       [&](const auto& a, const auto& b) { return less_than(runtime_, a.first, b.first); });
    }
    out += '{';
    ++depth_;
    bool first = true;
    for (const auto& [key, value] : entries) {
      if (!first) out += style_.item_separator;
      first = false;
      new_line(depth_);
      write_key(key);
      out += style_.key_separator;
      write(value);
    }
    new_line(--depth_);
    out += '}';
  }

  void write_key(const Value& key) {
    switch (key.kind()) {
      case Kind::kString:
        write_string(key.text());
        return;
      case Kind::kFloat:
        out += '"' + number(key.as_float()) + '"';
        return;
      case Kind::kInt:
        out += '"' + std::to_string(key.as_int()) + '"';
        return;
      case Kind::kBool:
        out += key.as_int() != 0 ? "\"true\"" : "\"false\"";
        return;
      case Kind::kNone:
        out += "\"null\"";
        return;
      default:
        fail("keys must be str, int, float, bool or None, not {}", type_name(key));
    }
  }

  void write_string(const std::string& text) {
    runtime_.step_bytes(text.size());
    constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f", kEscapes = "\"\\nrtbf";
    out += '"';
    for (size_t i = 0; i < text.size();) {
      const size_t begin = i;
      const char32_t c = next_code_point(text, i);
      const size_t escape = c < 0x80 ? kEscaped.find(static_cast<char>(c)) : std::string_view::npos;
      if (escape != std::string_view::npos) {
        out += '\\';
        out += kEscapes[escape];
      } else if (c < 0x20 || (style_.ensure_ascii && c > 0x7E && c < 0x10000)) {
        out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
      } else if (style_.ensure_ascii && c >= 0x10000) {
        const auto high = static_cast<uint32_t>(0xD800 + ((c - 0x10000) >> 10));
        const auto low = static_cast<uint32_t>(0xDC00 + ((c - 0x10000) & 0x3FF));
        out += fmt::format("\\u{:04x}\\u{:04x}", high, low);
      } else {
        out.append(text, begin, i - begin);
      }
    }
    out += '"';
  }

  Runtime& runtime_;
  const JsonStyle& style_;
  int depth_ = 0;
};

}  // namespace

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[40];
  const auto end = std::to_chars(std::begin(buffer), std::end(buffer), value, std::chars_format::scientific);
  // d.ddde[+-]dd: the shortest digits that read back as this number. Python writes them without exponent
  // from 1e-4 up to 1e16.
  const std::string text(std::begin(buffer), end.ptr);
  const size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  const std::string sign = text[0] == '-' ? "-" : "";
  std::string digits;
  for (const char c : text.substr(sign.size(), e - sign.size())) {
    if (c != '.') digits += c;
  }
  if (exponent < -4 || exponent >= 16) {
    std::string mantissa = digits.substr(0, 1);
    if (digits.size() > 1) mantissa += "." + digits.substr(1);
    return fmt::format("{}{}e{}{:02}", sign, mantissa, exponent < 0 ? "-" : "+", std::abs(exponent));
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

std::string to_repr(Runtime& runtime, const Value& value) {
  Writer writer(runtime);
  writer.repr(value);
  return std::move(writer.out);
}

std::string to_str(Runtime& runtime, const Value& value) {
  if (value.is(Kind::kString)) {
    runtime.step_bytes(value.text().size());
    return value.text();
  }
  if (value.is(Kind::kUndefined)) return "";
  return to_repr(runtime, value);
}

std::string to_json(Runtime& runtime, const Value& value, const JsonStyle& style) {
  JsonWriter writer(runtime, style);
  writer.write(value);
  return std::move(writer.out);
}

std::string escape_html(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace nibble::jinja
