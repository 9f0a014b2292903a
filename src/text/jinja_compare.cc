// ==, <, in, and the hashes of dict keys.
#include <cmath>
#include <limits>

#include "text/jinja_value.h"

namespace nibble::jinja {
namespace {

// Exact: a long double holds every 64-bit integer and every double.
long double exact(const Value& value) {
  return value.is(Kind::kFloat) ? static_cast<long double>(value.as_float())
                                : static_cast<long double>(value.as_int());
}
static_assert(std::numeric_limits<long double>::digits >= 64);

bool equal_dicts(Runtime& runtime, Dict& a, Dict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const Value* other = b.find(runtime, key);
    if (other == nullptr || !equals(runtime, value, *other)) return false;
  }
  return true;
}

bool is_set_like(const Value& value) {
  return value.is(Kind::kView) && value.as<View>().what != View::What::kValues;
}

}  // namespace

bool is_same(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
    // Python keeps one object for each small integer; beyond them identity is an accident.
    case Kind::kInt:
      return a.as_int() == b.as_int();
    case Kind::kFloat:
      return false;
    default:
      return a.object() == b.object();
  }
}

bool equals(Runtime& runtime, const Value& a, const Value& b) {
  runtime.step();
  if (a.is_number() && b.is_number()) return exact(a) == exact(b);
  if (is_set_like(a) && is_set_like(b)) {
    if (length_of(a) != length_of(b)) return false;
    for (int64_t i = 0; i < *length_of(a); ++i) {
      if (!contains(runtime, b, element(runtime, a, i))) return false;
    }
    return true;
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      runtime.step_bytes(std::min(a.text().size(), b.text().size()));
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple: {
      if (a.object() == b.object()) return true;
      if (a.items().size() != b.items().size()) return false;
      const Runtime::Level level(runtime);
      for (size_t i = 0; i < a.items().size(); ++i) {
        if (!equals(runtime, a.items()[i], b.items()[i])) return false;
      }
      return true;
    }
    case Kind::kDict: {
      if (a.object() == b.object()) return true;
      const Runtime::Level level(runtime);
      return equal_dicts(runtime, a.dict(), b.dict());
    }
    case Kind::kRange: {
      const Range& x = a.as<Range>();
      const Range& y = b.as<Range>();
      return x.length == y.length && (x.length == 0 || x.start == y.start) &&
             (x.length < 2 || x.step == y.step);
    }
    default:
      return a.object() == b.object();
  }
}

bool less_than(Runtime& runtime, const Value& a, const Value& b) {
  runtime.step();
  reject_undefined(a);
  reject_undefined(b);
  if (a.is_number() && b.is_number()) return exact(a) < exact(b);
  if (a.is(Kind::kString) && b.is(Kind::kString)) {
    runtime.step_bytes(std::min(a.text().size(), b.text().size()));
    return a.text() < b.text();  // UTF-8 sorts as its code points do
  }
  if (a.is_sequence() && a.kind() == b.kind()) {
    const Runtime::Level level(runtime);
    const auto& x = a.items();
    const auto& y = b.items();
    for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!is_same(x[i], y[i]) && !equals(runtime, x[i], y[i])) return less_than(runtime, x[i], y[i]);
    }
    return x.size() < y.size();
  }
  fail("'<' is not supported between '{}' and '{}'", type_name(a), type_name(b));
}

bool contains(Runtime& runtime, const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kString: {
      if (!item.is(Kind::kString)) fail("'in <string>' requires a string, not '{}'", type_name(item));
      runtime.step_bytes(container.text().size());
      return container.text().find(item.text()) != std::string::npos;
    }
    case Kind::kDict:
      return container.dict().find(runtime, item) != nullptr;
    case Kind::kView: {
      const View& view = container.as<View>();
      if (view.what == View::What::kKeys) return view.dict->find(runtime, item) != nullptr;
      if (view.what == View::What::kItems) {
        if (!item.is(Kind::kTuple) || item.items().size() != 2) return false;
        const Value* value = view.dict->find(runtime, item.items()[0]);
        return value != nullptr && equals(runtime, *value, item.items()[1]);
      }
      break;
    }
    default:
      break;
  }
  if (!container.is(Kind::kIterator) && !length_of(container)) {
    fail("argument of type '{}' is not iterable", type_name(container));
  }
  Iterator& iterator = iterate(runtime, container);
  for (Value candidate; iterator.next(candidate);) {
    if (is_same(candidate, item) || equals(runtime, candidate, item)) return true;
  }
  return false;
}

size_t hash_of(Runtime& runtime, const Value& value) {
  runtime.step();
  switch (value.kind()) {
    case Kind::kBool:
    case Kind::kInt:
    case Kind::kFloat:
      return std::hash<long double>()(exact(value));
    case Kind::kString:
      runtime.step_bytes(value.text().size());
      return std::hash<std::string>()(value.text());
    case Kind::kTuple: {
      const Runtime::Level level(runtime);
      size_t hash = value.items().size();
      for (const Value& item : value.items()) hash = hash * 1000003 ^ hash_of(runtime, item);
      return hash;
    }
    case Kind::kList:
    case Kind::kDict:
    case Kind::kView:
      fail("unhashable type: '{}'", type_name(value));
    case Kind::kUndefined:
    case Kind::kNone:
      return static_cast<size_t>(value.kind());
    case Kind::kRange:
      return static_cast<size_t>(value.as<Range>().length);
    default:
      return std::hash<Object*>()(value.object());
  }
}

}  // namespace nibble::jinja
