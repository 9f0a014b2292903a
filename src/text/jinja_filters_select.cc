// Filters that pick: map, select, reject and the like give iterators that run once and do their work when
// they are asked for the next item, so that what nobody asks for cannot fail.
#include "text/jinja_filters.h"

namespace nibble::jinja {
namespace {

Value default_value(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("default", args, "default_value boolean", 0);
  const bool missing = input.is(Kind::kUndefined) || (flag(bound[1]) && !truthy(input));
  if (!missing) return input;
  return bound[0] ? *bound[0] : runtime.string("");
}

Value items(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("items", args, "", 0);
  return runtime.iterator([&runtime, input, index = size_t{0}](Value& out) mutable {
    if (input.is(Kind::kUndefined)) return false;
    if (!input.is(Kind::kDict)) fail("can only get item pairs from a mapping");
    const auto& entries = input.dict().entries;
    if (index >= entries.size()) return false;
    out = runtime.tuple({entries[index].first, entries[index].second});
    ++index;
    return true;
  });
}

// The attribute alone, never the item of that name.
Value attribute(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("attr", args, "name", 1);
  const std::string& name = string_argument(*bound[0], "attr: name");
  reject_undefined(input);
  if (!input.is(Kind::kDict)) return get_attribute(runtime, input, name);
  const auto method = find_method(runtime, input, name);
  return method ? *method : runtime.undefined(fmt::format("'dict object' has no attribute '{}'", name));
}

// How map and select make one item out of another; made when the first item is asked for.
using Change = std::function<Value(const Value&)>;

Iterator* source_of(Runtime& runtime, const Value& input) {
  return truthy(input) ? &iterate(runtime, input) : nullptr;
}

Change make_change(Runtime& runtime, Args args) {
  std::optional<Value> attribute_name;
  std::optional<Value> fallback;
  for (const auto& [name, value] : args.named) {
    if (name == "attribute") attribute_name = value;
    if (name == "default") fallback = value;
  }
  if (args.positional.empty() && attribute_name) {
    if (args.named.size() != (fallback ? 2U : 1U)) fail("map: unexpected keyword argument");
    return [&runtime, path = AttributePath(runtime, *attribute_name), fallback = without_none(fallback)](
               const Value& item) { return path.get(runtime, item, fallback); };
  }
  if (args.positional.empty()) fail("map needs the name of a filter");
  const std::string name = string_argument(args.positional[0], "map: the name of the filter");
  const Filter filter = find_filter(name);
  if (filter == nullptr) fail("filter '{}' is not implemented", name);
  args.positional.erase(args.positional.begin());
  return
      [&runtime, filter, args = std::move(args)](const Value& item) { return filter(runtime, item, args); };
}

Value map(Runtime& runtime, const Value& input, const Args& args) {
  struct State {
    bool ready = false;
    Iterator* source = nullptr;
    Change change;
  };
  return runtime.iterator([&runtime, input, args, state = State()](Value& out) mutable {
    if (!state.ready) {
      state.ready = true;
      if (truthy(input)) {
        state.change = make_change(runtime, args);
        state.source = source_of(runtime, input);
      }
    }
    runtime.step();
    Value item;
    if (state.source == nullptr || !state.source->next(item)) return false;
    out = state.change(item);
    return true;
  });
}

using Holds = std::function<bool(const Value&)>;

Holds make_test(Runtime& runtime, Args args, bool by_attribute) {
  AttributePath path;
  if (by_attribute) {
    if (args.positional.empty()) fail("missing parameter for attribute name");
    path = AttributePath(runtime, args.positional[0]);
    args.positional.erase(args.positional.begin());
  }
  if (args.positional.empty()) {
    return [&runtime, path](const Value& item) { return truthy(path.get(runtime, item)); };
  }
  const std::string name = string_argument(args.positional[0], "the name of the test");
  const Test test = find_test(name);
  if (test == nullptr) fail("test '{}' is not implemented", name);
  args.positional.erase(args.positional.begin());
  return [&runtime, path, test, args = std::move(args)](const Value& item) {
    return test(runtime, path.get(runtime, item), args);
  };
}

Value pick(Runtime& runtime, const Value& input, const Args& args, bool by_attribute, bool wanted) {
  struct State {
    bool ready = false;
    Iterator* source = nullptr;
    Holds holds;
  };
  return runtime.iterator([&runtime, input, args, by_attribute, wanted, state = State()](Value& out) mutable {
    if (!state.ready) {
      state.ready = true;
      if (truthy(input)) {
        state.holds = make_test(runtime, args, by_attribute);
        state.source = source_of(runtime, input);
      }
    }
    Value item;
    while (state.source != nullptr && state.source->next(item)) {
      runtime.step();
      if (state.holds(item) != wanted) continue;
      out = item;
      return true;
    }
    return false;
  });
}

Value select(Runtime& runtime, const Value& input, const Args& args) {
  return pick(runtime, input, args, false, true);
}
Value reject(Runtime& runtime, const Value& input, const Args& args) {
  return pick(runtime, input, args, false, false);
}
Value select_attr(Runtime& runtime, const Value& input, const Args& args) {
  return pick(runtime, input, args, true, true);
}
Value reject_attr(Runtime& runtime, const Value& input, const Args& args) {
  return pick(runtime, input, args, true, false);
}

constexpr NamedFilter kFilters[] = {
    {"attr", attribute},
    {"d", default_value},
    {"default", default_value},
    {"items", items},
    {"map", map},
    {"reject", reject},
    {"rejectattr", reject_attr},
    {"select", select},
    {"selectattr", select_attr},
};

}  // namespace

Filter find_select_filter(std::string_view name) {
  for (const NamedFilter& entry : kFilters) {
    if (entry.name == name) return entry.filter;
  }
  return nullptr;
}

}  // namespace nibble::jinja
