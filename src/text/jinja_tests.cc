// What stands behind `is`.
#include <algorithm>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {
namespace {

template <Kind kKind>
bool is_kind(Runtime&, const Value& value, const Args& args) {
  bind_args("this test", args, "", 0);
  return value.is(kKind);
}
bool is_defined(Runtime&, const Value& value, const Args& args) {
  bind_args("defined", args, "", 0);
  return !value.is(Kind::kUndefined);
}
bool is_true(Runtime&, const Value& value, const Args& args) {
  bind_args("true", args, "", 0);
  return value.is(Kind::kBool) && truthy(value);
}
bool is_false(Runtime&, const Value& value, const Args& args) {
  bind_args("false", args, "", 0);
  return value.is(Kind::kBool) && !truthy(value);
}
bool is_number(Runtime&, const Value& value, const Args& args) {
  bind_args("number", args, "", 0);
  return value.is_number();
}

Value remainder(Runtime& runtime, const Value& value, const Value& divisor) {
  return binary(runtime, Operator::kMod, value, divisor);
}
bool is_odd(Runtime& runtime, const Value& value, const Args& args) {
  bind_args("odd", args, "", 0);
  return equals(runtime, remainder(runtime, value, Value(int64_t{2})), Value(int64_t{1}));
}
bool is_even(Runtime& runtime, const Value& value, const Args& args) {
  bind_args("even", args, "", 0);
  return equals(runtime, remainder(runtime, value, Value(int64_t{2})), Value(int64_t{0}));
}
bool is_divisible_by(Runtime& runtime, const Value& value, const Args& args) {
  const auto bound = bind_args("divisibleby", args, "num", 1);
  return equals(runtime, remainder(runtime, value, *bound[0]), Value(int64_t{0}));
}

bool is_cased(Runtime& runtime, const Value& value, bool (*wanted)(char32_t), bool (*forbidden)(char32_t)) {
  const std::string text = to_str(runtime, value);
  bool found = false;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (forbidden(c) || is_title(c)) return false;
    found |= wanted(c);
  }
  return found;
}
bool is_lower_case(Runtime& runtime, const Value& value, const Args& args) {
  bind_args("lower", args, "", 0);
  return is_cased(runtime, value, is_lower, is_upper);
}
bool is_upper_case(Runtime& runtime, const Value& value, const Args& args) {
  bind_args("upper", args, "", 0);
  return is_cased(runtime, value, is_upper, is_lower);
}

bool is_iterable(Runtime&, const Value& value, const Args& args) {
  bind_args("iterable", args, "", 0);
  return length_of(value) || value.is(Kind::kIterator) || value.is(Kind::kLoop);
}
bool is_sequence(Runtime&, const Value& value, const Args& args) {
  bind_args("sequence", args, "", 0);
  return length_of(value) && !value.is(Kind::kView);
}
bool is_callable(Runtime&, const Value& value, const Args& args) {
  bind_args("callable", args, "", 0);
  return value.is(Kind::kFunction) || value.is(Kind::kMacro) || value.is(Kind::kUndefined) ||
         value.is(Kind::kLoop);
}
bool is_escaped(Runtime&, const Value& value, const Args& args) {
  bind_args("escaped", args, "", 0);
  return value.is(Kind::kString) && value.string().markup;
}
bool is_same_as(Runtime&, const Value& value, const Args& args) {
  return is_same(value, *bind_args("sameas", args, "other", 1)[0]);
}
bool is_in(Runtime& runtime, const Value& value, const Args& args) {
  return contains(runtime, *bind_args("in", args, "seq", 1)[0], value);
}
bool is_filter(Runtime& runtime, const Value& value, const Args& args) {
  bind_args("filter", args, "", 0);
  hash_of(runtime, value);  // Jinja looks it up in a dict
  return value.is(Kind::kString) && find_filter(value.text()) != nullptr;
}
bool is_test(Runtime& runtime, const Value& value, const Args& args) {
  bind_args("test", args, "", 0);
  hash_of(runtime, value);
  return value.is(Kind::kString) && find_test(value.text()) != nullptr;
}

Value other(const Args& args) {
  if (!args.named.empty()) fail("a comparison takes no keyword arguments");
  return *bind_args("a comparison", args, "other", 1)[0];
}
bool is_equal(Runtime& runtime, const Value& value, const Args& args) {
  return equals(runtime, value, other(args));
}
bool is_not_equal(Runtime& runtime, const Value& value, const Args& args) {
  return !equals(runtime, value, other(args));
}
bool is_less(Runtime& runtime, const Value& value, const Args& args) {
  return less_than(runtime, value, other(args));
}
bool is_greater(Runtime& runtime, const Value& value, const Args& args) {
  return less_than(runtime, other(args), value);
}
bool is_at_most(Runtime& runtime, const Value& value, const Args& args) {
  return less_than(runtime, value, other(args)) || equals(runtime, value, other(args));
}
bool is_at_least(Runtime& runtime, const Value& value, const Args& args) {
  return less_than(runtime, other(args), value) || equals(runtime, value, other(args));
}

struct Named {
  std::string_view name;
  Test test;
};
constexpr Named kTests[] = {
    {"!=", is_not_equal},
    {"<", is_less},
    {"<=", is_at_most},
    {"==", is_equal},
    {">", is_greater},
    {">=", is_at_least},
    {"boolean", is_kind<Kind::kBool>},
    {"callable", is_callable},
    {"defined", is_defined},
    {"divisibleby", is_divisible_by},
    {"eq", is_equal},
    {"equalto", is_equal},
    {"escaped", is_escaped},
    {"even", is_even},
    {"false", is_false},
    {"filter", is_filter},
    {"float", is_kind<Kind::kFloat>},
    {"ge", is_at_least},
    {"greaterthan", is_greater},
    {"gt", is_greater},
    {"in", is_in},
    {"integer", is_kind<Kind::kInt>},
    {"iterable", is_iterable},
    {"le", is_at_most},
    {"lessthan", is_less},
    {"lower", is_lower_case},
    {"lt", is_less},
    {"mapping", is_kind<Kind::kDict>},
    {"ne", is_not_equal},
    {"none", is_kind<Kind::kNone>},
    {"number", is_number},
    {"odd", is_odd},
    {"sameas", is_same_as},
    {"sequence", is_sequence},
    {"string", is_kind<Kind::kString>},
    {"test", is_test},
    {"true", is_true},
    {"undefined", is_kind<Kind::kUndefined>},
    {"upper", is_upper_case},
};

}  // namespace

Test find_test(std::string_view name) {
  for (const Named& entry : kTests) {
    if (entry.name == name) return entry.test;
  }
  return nullptr;
}

}  // namespace nibble::jinja
