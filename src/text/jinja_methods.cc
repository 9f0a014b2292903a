// Methods of strings, lists, tuples and dicts. The sandbox is an immutable one: a method that changes its
// object is there, but to call it is an error.
#include <algorithm>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {

// ---- jinja_string_methods.cc
using Method = Value (*)(Runtime&, const Value& self, const Args&);
Method find_string_method(std::string_view name);

namespace {

struct Named {
  std::string_view name;
  Method method;
};

Value index_of(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("index()", args, "value", 1);
  for (size_t i = 0; i < self.items().size(); ++i) {
    if (equals(runtime, self.items()[i], *bound[0])) return Value(static_cast<int64_t>(i));
  }
  fail("{} is not in the {}", to_repr(runtime, *bound[0]), type_name(self));
}

Value count_of(Runtime& runtime, const Value& self, const Args& args) {
  const auto bound = bind_args("count()", args, "value", 1);
  int64_t count = 0;
  for (const Value& item : self.items()) count += equals(runtime, item, *bound[0]) ? 1 : 0;
  return Value(count);
}

Value copy_list(Runtime& runtime, const Value& self, const Args& args) {
  bind_args("copy()", args, "", 0);
  return runtime.list(self.items());
}

Value dict_get(Runtime& runtime, const Value& self, const Args& args) {
  if (!args.named.empty()) fail("dict.get() takes no keyword arguments");
  const auto bound = bind_args("get()", args, "key default", 1);
  const Value* found = self.dict().find(runtime, *bound[0]);
  return found != nullptr ? *found : bound[1].value_or(Value());
}

Value dict_view(Runtime& runtime, const Value& self, const Args& args, View::What what) {
  bind_args("a view of a dict", args, "", 0);
  auto* view = runtime.heap().make<View>();
  view->dict = &self.dict();
  view->what = what;
  return {Kind::kView, view};
}
Value dict_items(Runtime& runtime, const Value& self, const Args& args) {
  return dict_view(runtime, self, args, View::What::kItems);
}
Value dict_keys(Runtime& runtime, const Value& self, const Args& args) {
  return dict_view(runtime, self, args, View::What::kKeys);
}
Value dict_values(Runtime& runtime, const Value& self, const Args& args) {
  return dict_view(runtime, self, args, View::What::kValues);
}
Value copy_dict(Runtime& runtime, const Value& self, const Args& args) {
  bind_args("copy()", args, "", 0);
  Dict* copy = runtime.dict();
  for (const auto& [key, value] : self.dict().entries) copy->set(runtime, key, value);
  return {Kind::kDict, copy};
}

constexpr Named kListMethods[] = {{"index", index_of}, {"count", count_of}, {"copy", copy_list}};
constexpr Named kTupleMethods[] = {{"index", index_of}, {"count", count_of}};
constexpr Named kDictMethods[] = {{"get", dict_get},
                                  {"items", dict_items},
                                  {"keys", dict_keys},
                                  {"values", dict_values},
                                  {"copy", copy_dict}};

constexpr std::string_view kListChanges[] = {"append", "clear", "pop",    "reverse",
                                             "insert", "sort",  "extend", "remove"};
constexpr std::string_view kDictChanges[] = {"clear", "pop", "popitem", "setdefault", "update"};

// What Python has and this does not: an error says so, where a name that Python lacks, too, is undefined.
constexpr std::string_view kMissingOfString[] = {"casefold",     "encode",      "expandtabs", "format_map",
                                                 "isidentifier", "isprintable", "istitle",    "maketrans",
                                                 "swapcase",     "translate"};
constexpr std::string_view kMissingOfDict[] = {"fromkeys"};
constexpr std::string_view kMissingOfInt[] = {
    "as_integer_ratio", "bit_count", "bit_length", "conjugate", "denominator",
    "from_bytes",       "imag",      "numerator",  "real",      "to_bytes"};
constexpr std::string_view kMissingOfFloat[] = {"as_integer_ratio", "conjugate", "fromhex", "hex", "imag",
                                                "is_integer",       "real"};
constexpr std::string_view kMissingOfRange[] = {"count", "index", "start", "step", "stop"};
constexpr std::string_view kMissingOfView[] = {"isdisjoint", "mapping"};
constexpr std::string_view kMissingOfIterator[] = {"close",   "send",     "throw",
                                                   "gi_code", "gi_frame", "gi_running"};

template <class Table>
bool lists(const Table& table, std::string_view name) {
  return std::find(std::begin(table), std::end(table), name) != std::end(table);
}
template <class Table>
Method find_in(const Table& table, std::string_view name) {
  for (const Named& entry : table) {
    if (entry.name == name) return entry.method;
  }
  return nullptr;
}

bool is_missing(const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Kind::kString:
      return lists(kMissingOfString, name);
    case Kind::kDict:
      return lists(kMissingOfDict, name);
    case Kind::kBool:
    case Kind::kInt:
      return lists(kMissingOfInt, name);
    case Kind::kFloat:
      return lists(kMissingOfFloat, name);
    case Kind::kRange:
      return lists(kMissingOfRange, name);
    case Kind::kView:
      return lists(kMissingOfView, name);
    case Kind::kIterator:
      return lists(kMissingOfIterator, name);
    default:
      return false;
  }
}

}  // namespace

std::optional<Value> find_method(Runtime& runtime, const Value& object, const std::string& name) {
  Method method = nullptr;
  bool changes = false;
  switch (object.kind()) {
    case Kind::kString:
      method = find_string_method(name);
      break;
    case Kind::kList:
      method = find_in(kListMethods, name);
      changes = lists(kListChanges, name);
      break;
    case Kind::kTuple:
      method = find_in(kTupleMethods, name);
      break;
    case Kind::kDict:
      method = find_in(kDictMethods, name);
      changes = lists(kDictChanges, name);
      break;
    default:
      break;
  }
  if (changes) {
    return runtime.undefined(
        fmt::format("access to attribute '{}' of '{}' object is unsafe", name, type_name(object)));
  }
  if (method == nullptr) {
    if (is_missing(object, name)) fail("'{}' of a '{}' object is not implemented", name, type_name(object));
    return std::nullopt;
  }
  return runtime.function(
      name, [method, object](Runtime& inner, Args& args) { return method(inner, object, args); });
}

}  // namespace nibble::jinja
