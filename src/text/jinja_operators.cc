// Arithmetic, subscripts, attributes and calls, with Python's results. Integers have 64 bits: what Python
// would make larger is an error.
#include <algorithm>
#include <cmath>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {
namespace {

constexpr std::string_view kSpellings[] = {"+", "-", "*", "/", "//", "%", "**"};
// What every object of Python has, and the sandbox hides.
constexpr std::string_view kUnsafe[] = {"__class__", "__doc__", "__init__",   "__new__",
                                        "__eq__",    "__ne__",  "__hash__",   "__str__",
                                        "__repr__",  "__dir__", "__format__", "__reduce__"};
constexpr int64_t kExactInDouble = int64_t{1} << 53;

[[noreturn]] void fail_overflow() { fail("an integer does not fit 64 bits"); }
[[noreturn]] void fail_zero() { fail("division by zero"); }
[[noreturn]] void fail_types(Operator op, const Value& a, const Value& b) {
  reject_undefined(a);
  reject_undefined(b);
  fail("unsupported operand types for {}: '{}' and '{}'", kSpellings[static_cast<size_t>(op)], type_name(a),
       type_name(b));
}

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) fail_zero();
  if (b == -1) {  // INT64_MIN / -1 does not fit
    int64_t negated = 0;
    if (__builtin_sub_overflow(int64_t{0}, a, &negated)) fail_overflow();
    return negated;
  }
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0);
}
int64_t floor_mod(int64_t a, int64_t b) {
  if (b == 0) fail_zero();
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

double float_mod(double a, double b) {
  if (b == 0) fail_zero();
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return (b < 0) != (rest < 0) ? rest + b : rest;
}
double float_floor_div(double a, double b) {
  if (b == 0) fail_zero();
  const double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double whole = std::floor(quotient);
  return quotient - whole > 0.5 ? whole + 1 : whole;
}

double float_pow(double a, double b) {
  if (a == 0 && b < 0) fail("zero cannot be raised to a negative power");
  if (a < 0 && std::isfinite(a) && std::isfinite(b) && b != std::floor(b))
    fail("complex numbers are not implemented");
  const double power = std::pow(a, b);
  if (std::isinf(power) && std::isfinite(a) && std::isfinite(b)) fail("the result of ** is too large");
  return power;
}

Value int_pow(int64_t base, int64_t exponent) {
  if (exponent < 0) return Value(float_pow(static_cast<double>(base), static_cast<double>(exponent)));
  int64_t power = 1;
  while (exponent > 0) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(power, base, &power)) fail_overflow();
    exponent >>= 1;
    if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) fail_overflow();
  }
  return Value(power);
}

Value int_binary(Operator op, int64_t a, int64_t b) {
  int64_t out = 0;
  switch (op) {
    case Operator::kAdd:
      if (__builtin_add_overflow(a, b, &out)) fail_overflow();
      return Value(out);
    case Operator::kSub:
      if (__builtin_sub_overflow(a, b, &out)) fail_overflow();
      return Value(out);
    case Operator::kMul:
      if (__builtin_mul_overflow(a, b, &out)) fail_overflow();
      return Value(out);
    case Operator::kDiv: {
      if (b == 0) fail_zero();
      const bool exact =
          a >= -kExactInDouble && a <= kExactInDouble && b >= -kExactInDouble && b <= kExactInDouble;
      if (exact) return Value(static_cast<double>(a) / static_cast<double>(b));
      return Value(static_cast<double>(static_cast<long double>(a) / static_cast<long double>(b)));
    }
    case Operator::kFloorDiv:
      return Value(floor_div(a, b));
    case Operator::kMod:
      return Value(floor_mod(a, b));
    case Operator::kPow:
      return int_pow(a, b);
  }
  return {};
}

Value float_binary(Operator op, double a, double b) {
  switch (op) {
    case Operator::kAdd:
      return Value(a + b);
    case Operator::kSub:
      return Value(a - b);
    case Operator::kMul:
      return Value(a * b);
    case Operator::kDiv:
      if (b == 0) fail_zero();
      return Value(a / b);
    case Operator::kFloorDiv:
      return Value(float_floor_div(a, b));
    case Operator::kMod:
      return Value(float_mod(a, b));
    case Operator::kPow:
      return Value(float_pow(a, b));
  }
  return {};
}

Value add_strings(Runtime& runtime, const Value& a, const Value& b) {
  const bool markup = a.string().markup || b.string().markup;
  const auto part = [&](const Value& value) {
    return markup && !value.string().markup ? escape_html(value.text()) : value.text();
  };
  runtime.step_bytes(a.text().size() + b.text().size());
  return runtime.string(part(a) + part(b), markup);
}

Value repeat(Runtime& runtime, const Value& value, int64_t count) {
  count = std::max<int64_t>(count, 0);
  int64_t size = 0;
  const bool text = value.is(Kind::kString);
  const auto unit = static_cast<int64_t>(text ? value.text().size() : value.items().size());
  if (__builtin_mul_overflow(unit, count, &size)) fail("a repetition is too long");
  if (text) {
    if (size > runtime.limits.max_output_bytes) {
      fail("a repeated string is longer than {} bytes", runtime.limits.max_output_bytes);
    }
    std::string out;
    out.reserve(static_cast<size_t>(size));
    for (int64_t i = 0; i < count && unit > 0; ++i) out += value.text();
    return runtime.string(std::move(out), value.string().markup);
  }
  if (size > runtime.limits.max_memory_bytes / static_cast<int64_t>(sizeof(Value))) {
    fail("a repeated list takes more than {} bytes", runtime.limits.max_memory_bytes);
  }
  runtime.step(size / 16);
  std::vector<Value> out;
  out.reserve(static_cast<size_t>(size));
  for (int64_t i = 0; i < count && unit > 0; ++i) {
    out.insert(out.end(), value.items().begin(), value.items().end());
  }
  return value.is(Kind::kList) ? runtime.list(std::move(out)) : runtime.tuple(std::move(out));
}

bool is_repeatable(const Value& value) { return value.is(Kind::kString) || value.is_sequence(); }

std::string object_name(const Value& value) {
  return value.is(Kind::kNone) ? "None" : fmt::format("{} object", type_name(value));
}
Value no_attribute(Runtime& runtime, const Value& object, const std::string& name) {
  return runtime.undefined(fmt::format("'{}' has no attribute '{}'", object_name(object), name));
}

}  // namespace

Value binary(Runtime& runtime, Operator op, const Value& a, const Value& b) {
  if (a.is_integer() && b.is_integer()) return int_binary(op, a.as_int(), b.as_int());
  if (a.is_number() && b.is_number()) return float_binary(op, a.as_float(), b.as_float());
  if (op == Operator::kMod && a.is(Kind::kString)) {
    if (a.string().markup) fail("'%' on an escaped string is not implemented");
    return runtime.string(percent_format(runtime, a.text(), b));
  }
  if (op == Operator::kAdd && a.is(Kind::kString) && b.is(Kind::kString)) return add_strings(runtime, a, b);
  if (op == Operator::kAdd && a.is_sequence() && a.kind() == b.kind()) {
    std::vector<Value> items = a.items();
    items.insert(items.end(), b.items().begin(), b.items().end());
    return a.is(Kind::kList) ? runtime.list(std::move(items)) : runtime.tuple(std::move(items));
  }
  if (op == Operator::kMul && is_repeatable(a) && b.is_integer()) return repeat(runtime, a, b.as_int());
  if (op == Operator::kMul && a.is_integer() && is_repeatable(b)) return repeat(runtime, b, a.as_int());
  fail_types(op, a, b);
}

Value negate(const Value& value) {
  reject_undefined(value);
  if (value.is(Kind::kFloat)) return Value(-value.as_float());
  if (!value.is_integer()) fail("bad operand type for unary -: '{}'", type_name(value));
  return int_binary(Operator::kSub, 0, value.as_int());
}

Value get_attribute(Runtime& runtime, const Value& object, const std::string& name) {
  if (std::find(std::begin(kUnsafe), std::end(kUnsafe), name) != std::end(kUnsafe)) {
    return runtime.undefined(
        fmt::format("access to attribute '{}' of '{}' object is unsafe", name, type_name(object)));
  }
  reject_undefined(object);
  switch (object.kind()) {
    case Kind::kNamespace: {
      const Value* found = object.dict().find(runtime, name);
      return found != nullptr && !name.starts_with('_') ? *found : no_attribute(runtime, object, name);
    }
    case Kind::kLoop:
      return loop_attribute(runtime, object, name);
    case Kind::kMacro:
      for (const auto& [attribute, value] : object.as<Function>().attributes) {
        if (attribute == name) return value;
      }
      return no_attribute(runtime, object, name);
    case Kind::kTuple:
      if (object.as<List>().group && name == "grouper") return object.items()[0];
      if (object.as<List>().group && name == "list") return object.items()[1];
      break;
    case Kind::kCycler: {
      auto* cycler = &object.as<Cycler>();
      if (name == "current") return cycler->items[cycler->position];
      if (name == "reset") {
        return runtime.function(name, [cycler](Runtime&, Args&) {
          cycler->position = 0;
          return Value();
        });
      }
      if (name != "next") return no_attribute(runtime, object, name);
      return runtime.function(name, [cycler](Runtime&, Args&) {
        const Value item = cycler->items[cycler->position];
        cycler->position = (cycler->position + 1) % cycler->items.size();
        return item;
      });
    }
    default:
      break;
  }
  if (const auto method = find_method(runtime, object, name)) return *method;
  if (object.is(Kind::kDict)) {
    if (const Value* found = object.dict().find(runtime, name)) return *found;
  }
  return no_attribute(runtime, object, name);
}

Value get_item(Runtime& runtime, const Value& object, const Value& key) {
  reject_undefined(object);
  const bool indexable = object.is(Kind::kString) || object.is_sequence() || object.is(Kind::kRange);
  if (indexable && key.is_integer()) {
    const int64_t length = *length_of(object);
    int64_t index = key.as_int();
    if (index < 0) index += length;
    if (index >= 0 && index < length) return element(runtime, object, index);
  } else if (object.is(Kind::kDict)) {
    const bool hashable = !key.is(Kind::kList) && !key.is(Kind::kDict) && !key.is(Kind::kView);
    const Value* found = hashable ? object.dict().find(runtime, key) : nullptr;
    if (found != nullptr) return *found;
  }
  if (key.is(Kind::kString)) return get_attribute(runtime, object, key.text());
  return runtime.undefined(fmt::format("{} has no element {}", object_name(object), to_repr(runtime, key)));
}

namespace {

struct SliceBounds {
  int64_t start, step, count;
};

int64_t slice_index(const Value& value, int64_t fallback) {
  if (value.is(Kind::kNone)) return fallback;
  if (!value.is_integer()) fail("slice indices must be integers or None, not '{}'", type_name(value));
  return value.as_int();
}

SliceBounds slice_bounds(const Value& start_value, const Value& stop_value, const Value& step_value,
                         int64_t length) {
  const int64_t step = std::max(slice_index(step_value, 1), -INT64_MAX);
  if (step == 0) fail("slice step cannot be zero");
  const int64_t low = step < 0 ? -1 : 0;
  const int64_t high = step < 0 ? length - 1 : length;
  const auto clamp = [&](const Value& value, int64_t fallback) {
    int64_t index = slice_index(value, fallback);
    if (value.is(Kind::kNone)) return index;
    if (index < 0) index += length;  // both are far from overflow together: length >= 0
    return std::min(std::max(index, low), high);
  };
  const int64_t start = clamp(start_value, step < 0 ? high : low);
  const int64_t stop = clamp(stop_value, step < 0 ? low : high);
  const int64_t span = step < 0 ? start - stop : stop - start;
  return {start, step, span <= 0 ? 0 : (span - 1) / std::abs(step) + 1};
}

Value slice_string(Runtime& runtime, const Value& value, const SliceBounds& bounds) {
  const std::string& text = value.text();
  const bool markup = value.string().markup;
  runtime.step_bytes(text.size());
  if (bounds.count == 0) return runtime.string("", markup);
  const bool ascii = value.string().length == static_cast<int64_t>(text.size());
  if (bounds.step == 1) {
    const size_t begin = ascii ? static_cast<size_t>(bounds.start) : byte_offset(text, bounds.start);
    const std::string_view rest = std::string_view(text).substr(begin);
    return runtime.string(std::string(rest.substr(0, ascii ? static_cast<size_t>(bounds.count)
                                                           : byte_offset(rest, bounds.count))),
                          markup);
  }
  std::u32string characters;
  for (size_t i = 0; i < text.size();) characters += next_code_point(text, i);
  std::string out;
  for (int64_t i = 0; i < bounds.count; ++i) {
    append_code_point(out, characters[static_cast<size_t>(bounds.start + i * bounds.step)]);
  }
  return runtime.string(std::move(out), markup);
}

}  // namespace

Value get_slice(Runtime& runtime, const Value& object, const Value& start, const Value& stop,
                const Value& step) {
  reject_undefined(object);
  if (!object.is(Kind::kString) && !object.is_sequence() && !object.is(Kind::kRange)) {
    fail("'{}' object cannot be sliced", type_name(object));
  }
  const SliceBounds bounds = slice_bounds(start, stop, step, *length_of(object));
  if (object.is(Kind::kString)) return slice_string(runtime, object, bounds);
  if (object.is(Kind::kRange)) fail("a slice of a range is not implemented");
  std::vector<Value> items;
  items.reserve(static_cast<size_t>(bounds.count));
  for (int64_t i = 0; i < bounds.count; ++i) {
    items.push_back(object.items()[static_cast<size_t>(bounds.start + i * bounds.step)]);
  }
  return object.is(Kind::kList) ? runtime.list(std::move(items)) : runtime.tuple(std::move(items));
}

Value call(Runtime& runtime, const Value& callee, Args& args) {
  reject_undefined(callee);
  if (!callee.is(Kind::kFunction) && !callee.is(Kind::kMacro)) {
    fail("'{}' object is not callable", type_name(callee));
  }
  runtime.step();
  return callee.as<Function>().call(runtime, args);
}

}  // namespace nibble::jinja
