// "%s" % x and "{}".format(x), with the parts of the two languages that templates use.
#include <algorithm>
#include <cmath>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {
namespace {

constexpr int64_t kMaxWidth = 10'000;  // of a field; more is an attack

struct Field {
  std::string fill = " ";
  char align = 0;  // < > ^ = or none
  char sign = 0;   // + or space
  bool alternate = false, comma = false;
  int64_t width = 0;
  int64_t precision = -1;  // -1: not given
  char type = 0;
};

std::string group_thousands(std::string digits) {
  const size_t end = std::min(digits.find_first_of(".e"), digits.size());
  for (size_t i = end; i > 3; i -= 3) digits.insert(i - 3, ",");
  return digits;
}

std::string pad(const std::string& text, const std::string& sign, const Field& field, char default_align) {
  const int64_t missing = field.width - count_code_points(text) - static_cast<int64_t>(sign.size());
  const auto fill = [&](int64_t count) {
    std::string out;
    for (int64_t i = 0; i < count; ++i) out += field.fill;
    return out;
  };
  if (missing <= 0) return sign + text;
  switch (field.align != 0 ? field.align : default_align) {
    case '<':
      return sign + text + fill(missing);
    case '^':
      return fill(missing / 2) + sign + text + fill(missing - missing / 2);
    case '=':
      return sign + fill(missing) + text;
    default:
      return fill(missing) + sign + text;
  }
}

std::string sign_of(bool negative, const Field& field) {
  return negative ? "-" : field.sign != 0 ? std::string(1, field.sign) : "";
}

std::string format_int(int64_t value, const Field& field) {
  const uint64_t magnitude = value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
  std::string digits;
  std::string prefix;
  switch (field.type) {
    case 'x':
      digits = fmt::format("{:x}", magnitude);
      prefix = "0x";
      break;
    case 'X':
      digits = fmt::format("{:X}", magnitude);
      prefix = "0X";
      break;
    case 'o':
      digits = fmt::format("{:o}", magnitude);
      prefix = "0o";
      break;
    case 'b':
      digits = fmt::format("{:b}", magnitude);
      prefix = "0b";
      break;
    default:
      digits = std::to_string(magnitude);
      break;
  }
  if (field.precision > static_cast<int64_t>(digits.size())) {
    digits.insert(0, static_cast<size_t>(field.precision) - digits.size(), '0');
  }
  if (field.comma) digits = group_thousands(digits);
  return pad(digits, sign_of(value < 0, field) + (field.alternate ? prefix : ""), field, '>');
}

std::string format_float(double value, const Field& field) {
  const bool negative = std::signbit(value) && !std::isnan(value);
  const double magnitude = std::fabs(value);
  const int precision = static_cast<int>(field.precision < 0 ? 6 : field.precision);
  std::string digits;
  if (std::isinf(value) || std::isnan(value)) {
    digits = std::isnan(value) ? "nan" : "inf";
    if (field.type >= 'A' && field.type <= 'Z') digits = to_upper(digits);
  } else {
    switch (field.type) {
      case 'e':
        digits = fmt::format("{:.{}e}", magnitude, precision);
        break;
      case 'E':
        digits = fmt::format("{:.{}E}", magnitude, precision);
        break;
      case 'g':
        digits = fmt::format("{:.{}g}", magnitude, precision);
        break;
      case 'G':
        digits = fmt::format("{:.{}G}", magnitude, precision);
        break;
      default:
        digits = fmt::format("{:.{}f}", magnitude, precision);
        break;
    }
  }
  if (field.type == '%') digits += '%';
  if (field.comma) digits = group_thousands(digits);
  return pad(digits, sign_of(negative, field), field, '>');
}

std::string format_text(std::string text, const Field& field) {
  if (field.precision >= 0) text.resize(byte_offset(text, field.precision));
  return pad(text, "", field, '<');
}

int64_t read_number(std::string_view text, size_t& position) {
  int64_t number = 0;
  while (position < text.size() && text[position] >= '0' && text[position] <= '9') {
    number = number * 10 + (text[position++] - '0');
    if (number > kMaxWidth) fail("a width in a format is larger than {}", kMaxWidth);
  }
  return number;
}

// ---- %

class PercentFormatter {
 public:
  PercentFormatter(Runtime& runtime, const Value& argument) : runtime_(runtime), argument_(argument) {}

  std::string run(const std::string& format) {
    const std::string_view text = format;
    for (size_t i = 0; i < text.size();) {
      if (text[i] != '%') {
        out_ += text[i++];
        continue;
      }
      directive(text, ++i);
      runtime_.step();
    }
    // A mapping may stay unused; Python takes lists and undefined values for mappings, too.
    const bool mapping = argument_.is(Kind::kDict) || argument_.is(Kind::kList) ||
                         argument_.is(Kind::kUndefined) || argument_.is(Kind::kRange);
    const bool left = argument_.is(Kind::kTuple) ? used_ < argument_.items().size() : used_ == 0 && !mapping;
    if (left) fail("not all arguments converted during string formatting");
    return std::move(out_);
  }

 private:
  const Value& next() {
    if (argument_.is(Kind::kTuple)) {
      if (used_ >= argument_.items().size()) fail("not enough arguments for format string");
      return argument_.items()[used_++];
    }
    if (used_++ > 0) fail("not enough arguments for format string");
    return argument_;
  }

  void directive(std::string_view text, size_t& i) {
    Field field;
    const Value* named = nullptr;
    if (i < text.size() && text[i] == '(') {
      const size_t close = text.find(')', i);
      if (close == std::string_view::npos) fail("incomplete format key");
      if (!argument_.is(Kind::kDict)) fail("format requires a mapping");
      named = argument_.dict().find(runtime_, text.substr(i + 1, close - i - 1));
      if (named == nullptr) fail("format key '{}' is missing", text.substr(i + 1, close - i - 1));
      used_ = 1;
      i = close + 1;
    }
    for (; i < text.size() && std::string_view("#0- +").find(text[i]) != std::string_view::npos; ++i) {
      if (text[i] == '#') field.alternate = true;
      if (text[i] == '-') field.align = '<';
      if (text[i] == '0' && field.align == 0) field.align = '=';
      if (text[i] == '+') field.sign = '+';
      if (text[i] == ' ' && field.sign == 0) field.sign = ' ';
    }
    if (field.align == '=') field.fill = "0";
    if (i < text.size() && text[i] == '*') fail("'*' in a format is not implemented");
    field.width = read_number(text, i);
    if (i < text.size() && text[i] == '.') {
      ++i;
      field.precision = read_number(text, i);
    }
    while (i < text.size() && (text[i] == 'l' || text[i] == 'h' || text[i] == 'L')) ++i;
    if (i >= text.size()) fail("incomplete format");
    field.type = text[i++];
    if (field.type == '%') {
      out_ += '%';
      return;
    }
    convert(field, named != nullptr ? *named : next());
  }

  void convert(Field& field, const Value& value) {
    const bool zero_fill = field.align == '=';
    switch (field.type) {
      case 's':
      case 'r':
      case 'a':
        if (field.type == 'a') fail("format character 'a' is not implemented");
        if (zero_fill) {
          field.align = '>';
          field.fill = " ";
        } else if (field.align == 0) {
          field.align = '>';
        }
        out_ += format_text(field.type == 's' ? to_str(runtime_, value) : to_repr(runtime_, value), field);
        return;
      case 'd':
      case 'i':
      case 'u':
        if (value.is(Kind::kFloat)) {
          Field whole = field;
          whole.type = 'f';
          whole.precision = 0;
          if (!std::isfinite(value.as_float())) fail("cannot convert float to integer");
          out_ += format_float(std::trunc(value.as_float()), whole);
          return;
        }
        if (!value.is_integer())
          fail("%{} format: a real number is required, not {}", field.type, type_name(value));
        out_ += format_int(value.as_int(), field);
        return;
      case 'x':
      case 'X':
      case 'o':
        if (!value.is_integer())
          fail("%{} format: an integer is required, not {}", field.type, type_name(value));
        out_ += format_int(value.as_int(), field);
        return;
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
        reject_undefined(value);
        if (!value.is_number()) fail("must be real number, not {}", type_name(value));
        out_ += format_float(value.as_float(), field);
        return;
      case 'c':
        if (!value.is(Kind::kString) || value.string().length != 1)
          fail("%c with this value is not implemented");
        field.precision = -1;
        if (field.align != '<') field.align = '>';
        field.fill = " ";
        out_ += format_text(value.text(), field);
        return;
      default:
        fail("unsupported format character '{}'", field.type);
    }
  }

  Runtime& runtime_;
  const Value& argument_;
  std::string out_;
  size_t used_ = 0;
};

// ---- {}

Field parse_spec(std::string_view spec) {
  Field field;
  size_t i = 0;
  const auto is_align = [&](size_t at) {
    return at < spec.size() && std::string_view("<>^=").find(spec[at]) != std::string_view::npos;
  };
  size_t after_fill = 0;
  if (!spec.empty()) next_code_point(spec, after_fill);
  if (is_align(after_fill) && after_fill > 0) {
    field.fill = spec.substr(0, after_fill);
    field.align = spec[after_fill];
    i = after_fill + 1;
  } else if (is_align(0)) {
    field.align = spec[0];
    i = 1;
  }
  const auto skip = [&](char c) {
    if (i >= spec.size() || spec[i] != c) return false;
    ++i;
    return true;
  };
  if (skip('+')) {
    field.sign = '+';
  } else if (skip(' ')) {
    field.sign = ' ';
  } else {
    skip('-');
  }
  field.alternate = skip('#');
  if (skip('0') && field.align == 0) {
    field.align = '=';
    field.fill = "0";
  }
  field.width = read_number(spec, i);
  field.comma = skip(',');
  if (skip('.')) {
    const size_t digits = i;
    field.precision = read_number(spec, i);
    if (i == digits) fail("format specifier missing precision");
  }
  if (i < spec.size()) field.type = spec[i++];
  if (i < spec.size()) fail("invalid format specifier '{}'", spec);
  return field;
}

std::string format_value(Runtime& runtime, const Value& value, const std::string& spec) {
  if (spec.empty()) return to_str(runtime, value);
  Field field = parse_spec(spec);
  const auto refuse = [&] {
    fail("format specifier '{}' for a '{}' is not implemented", spec, type_name(value));
  };
  if (value.is(Kind::kString)) {
    if ((field.type != 0 && field.type != 's') || field.align == '=' || field.sign != 0 || field.comma ||
        field.alternate) {
      refuse();
    }
    return format_text(value.text(), field);
  }
  const bool float_type =
      field.type != 0 && std::string_view("eEfFgG%").find(field.type) != std::string_view::npos;
  if (value.is_integer() && !float_type) {
    if (field.type != 0 && std::string_view("dxXob").find(field.type) == std::string_view::npos) refuse();
    if (field.precision >= 0 || (field.comma && field.fill == "0")) refuse();
    return format_int(value.as_int(), field);
  }
  if (value.is(Kind::kFloat) && field.type == 0 && field.precision < 0 && !field.comma && !field.alternate) {
    const bool negative = std::signbit(value.as_float());
    return pad(float_repr(std::fabs(value.as_float())), sign_of(negative, field), field, '>');
  }
  if (value.is_number() && float_type) {
    if (field.alternate || (field.comma && field.fill == "0")) refuse();
    return format_float(field.type == '%' ? value.as_float() * 100 : value.as_float(), field);
  }
  refuse();
  return "";
}

class BraceFormatter {
 public:
  BraceFormatter(Runtime& runtime, const Args& args) : runtime_(runtime), args_(args) {}

  std::string run(std::string_view text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
      const char c = text[i++];
      if ((c == '{' || c == '}') && i < text.size() && text[i] == c) {
        out += c;
        ++i;
      } else if (c == '}') {
        fail("single '}}' encountered in format string");
      } else if (c == '{') {
        const size_t close = text.find_first_of("{}", i);
        if (close == std::string_view::npos) fail("expected '}}' before end of string");
        if (text[close] == '{') fail("a field inside a field of a format is not implemented");
        out += field(text.substr(i, close - i));
        i = close + 1;
      } else {
        out += c;
      }
    }
    return out;
  }

 private:
  std::string field(std::string_view text) {
    runtime_.step();
    const size_t colon = std::min(text.find(':'), text.size());
    const std::string spec(text.substr(std::min(colon + 1, text.size())));
    std::string_view name = text.substr(0, colon);
    char conversion = 0;
    if (const size_t mark = name.find('!'); mark != std::string_view::npos) {
      if (mark + 2 != name.size()) fail("expected ':' after conversion specifier");
      conversion = name[mark + 1];
      name = name.substr(0, mark);
    }
    Value value = lookup(name);
    if (conversion == 'r') {
      value = runtime_.string(to_repr(runtime_, value));
    } else if (conversion == 's') {
      value = runtime_.string(to_str(runtime_, value));
    } else if (conversion != 0) {
      fail("conversion '{}' in a format is not implemented", conversion);
    }
    return format_value(runtime_, value, spec);
  }

  Value lookup(std::string_view path) {
    const size_t end = std::min(path.find_first_of(".["), path.size());
    Value value = root(path.substr(0, end));
    for (size_t i = end; i < path.size();) {
      if (path[i] == '.') {
        const size_t stop = std::min(path.find_first_of(".[", i + 1), path.size());
        value = get_attribute(runtime_, value, std::string(path.substr(i + 1, stop - i - 1)));
        i = stop;
        continue;
      }
      const size_t close = path.find(']', i);
      if (path[i] != '[' || close == std::string_view::npos) fail("missing ']' in format string");
      const std::string_view key = path.substr(i + 1, close - i - 1);
      const bool number =
          !key.empty() && std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; });
      size_t position = 0;
      value = get_item(runtime_, value,
                       number ? Value(read_number(key, position)) : runtime_.string(std::string(key)));
      i = close + 1;
    }
    return value;
  }

  Value root(std::string_view name) {
    const bool number = std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (number) {
      if (numbered_ != 0 && numbered_ != (name.empty() ? 1 : 2))
        fail("cannot mix '{{}}' and '{{0}}' in a format");
      numbered_ = name.empty() ? 1 : 2;
      size_t position = 0;
      const auto index = static_cast<size_t>(name.empty() ? next_++ : read_number(name, position));
      if (index >= args_.positional.size())
        fail("replacement index {} out of range for positional args", index);
      return args_.positional[index];
    }
    for (const auto& [key, value] : args_.named) {
      if (key == name) return value;
    }
    fail("format key '{}' is missing", name);
  }

  Runtime& runtime_;
  const Args& args_;
  int64_t next_ = 0;
  int numbered_ = 0;  // 1: {} was used, 2: {0} was
};

}  // namespace

std::string percent_format(Runtime& runtime, const std::string& format, const Value& argument) {
  runtime.step_bytes(format.size());
  return PercentFormatter(runtime, argument).run(format);
}

std::string brace_format(Runtime& runtime, const std::string& format, const Args& args) {
  runtime.step_bytes(format.size());
  return BraceFormatter(runtime, args).run(format);
}

}  // namespace nibble::jinja
