// Filters over lists and dicts as a whole.
#include <algorithm>

#include "text/jinja_filters.h"
#include "text/jinja_unicode.h"

namespace nibble::jinja {

AttributePath::AttributePath(Runtime& runtime, const Value& path) {
  if (path.is(Kind::kNone)) return;
  if (!path.is(Kind::kString)) {
    parts_.push_back(path);
    return;
  }
  std::string_view rest = path.text();
  while (true) {
    const size_t dot = std::min(rest.find('.'), rest.size());
    const std::string part(rest.substr(0, dot));
    const bool number =
        !part.empty() && part.size() < 18 && part.find_first_not_of("0123456789") == std::string::npos;
    parts_.push_back(number ? Value(static_cast<int64_t>(std::stoll(part))) : runtime.string(part));
    if (dot == rest.size()) return;
    rest = rest.substr(dot + 1);
  }
}

Value AttributePath::get(Runtime& runtime, Value item, const std::optional<Value>& fallback) const {
  for (const Value& part : parts_) {
    runtime.step();
    item = get_item(runtime, item, part);
    if (fallback && item.is(Kind::kUndefined)) item = *fallback;
  }
  return item;
}

Value compare_key(Runtime& runtime, const Value& value, bool case_sensitive) {
  if (case_sensitive || !value.is(Kind::kString)) return value;
  return runtime.string(to_lower(value.text()));
}

namespace {

AttributePath path_of(Runtime& runtime, const std::optional<Value>& attribute) {
  return attribute ? AttributePath(runtime, *attribute) : AttributePath();
}

Value length(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("length", args, "", 0);
  const auto length = length_of(input);
  if (!length) fail("object of type '{}' has no len()", type_name(input));
  return Value(*length);
}

Value first(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("first", args, "", 0);
  Value item;
  if (iterate(runtime, input).next(item)) return item;
  return runtime.undefined("No first item, sequence was empty.");
}

Value last(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("last", args, "", 0);
  const auto length = length_of(input);
  if (!length) fail("'{}' object is not reversible", type_name(input));
  return *length > 0 ? element(runtime, input, *length - 1)
                     : runtime.undefined("No last item, sequence was empty.");
}

Value reverse(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("reverse", args, "", 0);
  if (input.is(Kind::kString)) {
    return get_slice(runtime, input, Value(), Value(), Value(int64_t{-1}));
  }
  if (const auto length = length_of(input)) {
    return runtime.iterator([&runtime, input, left = *length](Value& out) mutable {
      if (left == 0) return false;
      out = element(runtime, input, --left);
      return true;
    });
  }
  std::vector<Value> items = to_vector(runtime, input);
  std::reverse(items.begin(), items.end());
  return runtime.list(std::move(items));
}

Value to_list(Runtime& runtime, const Value& input, const Args& args) {
  bind_args("list", args, "", 0);
  return runtime.list(to_vector(runtime, input));
}

Value join(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("join", args, "d attribute", 0);
  const std::string separator = bound[0] ? to_str(runtime, *bound[0]) : "";
  const auto attribute = without_none(bound[1]);
  const AttributePath path = path_of(runtime, attribute);
  std::string out;
  bool is_first = true;
  Iterator& iterator = iterate(runtime, input);
  for (Value item; iterator.next(item);) {
    if (!is_first) out += separator;
    is_first = false;
    out += to_str(runtime, path.get(runtime, item));
    runtime.step_bytes(separator.size());
    if (static_cast<int64_t>(out.size()) > runtime.limits.max_output_bytes) {
      fail("join gives more than {} bytes", runtime.limits.max_output_bytes);
    }
  }
  return runtime.string(std::move(out));
}

// ---- order

struct Keyed {
  Value key, item;
};
// Stable, as Python's sorted(); `reverse` keeps the order of equal items, too.
std::vector<Value> sorted(Runtime& runtime, std::vector<Keyed> keyed, bool reverse) {
  std::stable_sort(keyed.begin(), keyed.end(), [&](const Keyed& a, const Keyed& b) {
    return reverse ? less_than(runtime, b.key, a.key) : less_than(runtime, a.key, b.key);
  });
  std::vector<Value> out;
  out.reserve(keyed.size());
  for (const Keyed& entry : keyed) out.push_back(entry.item);
  return out;
}

Value sort(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("sort", args, "reverse case_sensitive attribute", 0);
  std::vector<AttributePath> paths;
  if (bound[2] && bound[2]->is(Kind::kString)) {
    std::string_view rest = bound[2]->text();
    for (bool more = true; more;) {
      const size_t comma = std::min(rest.find(','), rest.size());
      paths.emplace_back(runtime, runtime.string(std::string(rest.substr(0, comma))));
      more = comma < rest.size();
      rest = rest.substr(std::min(comma + 1, rest.size()));
    }
  } else {
    paths.emplace_back(runtime, bound[2].value_or(Value()));
  }
  std::vector<Keyed> keyed;
  for (const Value& item : to_vector(runtime, input)) {
    std::vector<Value> key;
    key.reserve(paths.size());
    for (const AttributePath& path : paths) {
      key.push_back(compare_key(runtime, path.get(runtime, item), flag(bound[1])));
    }
    keyed.push_back({runtime.list(std::move(key)), item});
  }
  return runtime.list(sorted(runtime, std::move(keyed), flag(bound[0])));
}

Value dict_sort(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("dictsort", args, "case_sensitive by reverse", 0);
  const std::string by = bound[1] ? string_argument(*bound[1], "dictsort: by") : "key";
  if (by != "key" && by != "value") fail("dictsort: by must be 'key' or 'value'");
  reject_undefined(input);
  if (!input.is(Kind::kDict)) fail("'{}' object has no attribute 'items'", type_name(input));
  std::vector<Keyed> keyed;
  for (const auto& [key, value] : input.dict().entries) {
    keyed.push_back(
        {compare_key(runtime, by == "key" ? key : value, flag(bound[0])), runtime.tuple({key, value})});
  }
  return runtime.list(sorted(runtime, std::move(keyed), flag(bound[2])));
}

Value extreme(Runtime& runtime, const Value& input, const Args& args, bool largest) {
  const auto bound = bind_args(largest ? "max" : "min", args, "case_sensitive attribute", 0);
  const AttributePath path = path_of(runtime, bound[1]);
  std::optional<Keyed> best;
  Iterator& iterator = iterate(runtime, input);
  for (Value item; iterator.next(item);) {
    const Value key = compare_key(runtime, path.get(runtime, item), flag(bound[0]));
    if (!best || (largest ? less_than(runtime, best->key, key) : less_than(runtime, key, best->key))) {
      best = Keyed{key, item};
    }
  }
  return best ? best->item : runtime.undefined("No aggregated item, sequence was empty.");
}
Value smallest(Runtime& runtime, const Value& input, const Args& args) {
  return extreme(runtime, input, args, false);
}
Value largest(Runtime& runtime, const Value& input, const Args& args) {
  return extreme(runtime, input, args, true);
}

Value unique(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("unique", args, "case_sensitive attribute", 0);
  const bool case_sensitive = flag(bound[0]);
  Dict* seen = runtime.dict();
  return runtime.iterator([&runtime, input, case_sensitive, path = path_of(runtime, bound[1]), seen,
                           source = static_cast<Iterator*>(nullptr)](Value& out) mutable {
    if (source == nullptr) source = &iterate(runtime, input);
    while (source->next(out)) {
      const Value key = compare_key(runtime, path.get(runtime, out), case_sensitive);
      if (seen->find(runtime, key) != nullptr) continue;
      seen->set(runtime, key, Value());
      return true;
    }
    return false;
  });
}

Value group_by(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("groupby", args, "attribute default case_sensitive", 1);
  const AttributePath path(runtime, *bound[0]);
  const auto fallback = without_none(bound[1]);
  const auto key_of = [&](const Value& item) {
    return compare_key(runtime, path.get(runtime, item, fallback), flag(bound[2]));
  };
  std::vector<Keyed> keyed;
  for (const Value& item : to_vector(runtime, input)) keyed.push_back({key_of(item), item});
  std::vector<Value> groups;
  std::vector<Value> group;
  std::optional<Value> key;
  const auto close = [&] {
    if (!key) return;
    const Value grouper = path.get(runtime, group[0], fallback);
    const Value tuple = runtime.tuple({grouper, runtime.list(std::move(group))});
    tuple.as<List>().group = true;
    groups.push_back(tuple);
    group.clear();
  };
  for (const Value& item : sorted(runtime, std::move(keyed), false)) {
    const Value item_key = key_of(item);
    if (!key || !equals(runtime, *key, item_key)) {
      close();
      key = item_key;
    }
    group.push_back(item);
  }
  close();
  return runtime.list(std::move(groups));
}

// ---- arithmetic and rows

Value sum(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("sum", args, "attribute start", 0);
  const AttributePath path = path_of(runtime, bound[0]);
  Value total = bound[1].value_or(Value(int64_t{0}));
  if (total.is(Kind::kString)) fail("sum() can't sum strings");
  Iterator& iterator = iterate(runtime, input);
  for (Value item; iterator.next(item);) {
    total = binary(runtime, Operator::kAdd, total, path.get(runtime, item));
  }
  return total;
}

Value batch(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("batch", args, "linecount fill_with", 1);
  const int64_t count = int_argument(*bound[0], "batch: linecount");
  if (count > runtime.limits.max_steps) fail("batch: the row is too long");
  return runtime.iterator([&runtime, input, count, fill = without_none(bound[1]),
                           source = static_cast<Iterator*>(nullptr),
                           row = std::vector<Value>()](Value& out) mutable {
    if (source == nullptr) source = &iterate(runtime, input);
    for (Value item; source->next(item);) {
      runtime.step();
      const bool full = static_cast<int64_t>(row.size()) == count;
      if (full) out = runtime.list(std::exchange(row, {}));
      row.push_back(item);
      if (full) return true;
    }
    if (row.empty()) return false;
    while (fill && static_cast<int64_t>(row.size()) < count) {
      runtime.step();
      row.push_back(*fill);
    }
    out = runtime.list(std::exchange(row, {}));
    return true;
  });
}

Value slice(Runtime& runtime, const Value& input, const Args& args) {
  const auto bound = bind_args("slice", args, "slices fill_with", 1);
  const int64_t slices = int_argument(*bound[0], "slice: slices");
  return runtime.iterator([&runtime, input, slices, fill = without_none(bound[1]),
                           items = std::optional<std::vector<Value>>(), number = int64_t{0},
                           offset = size_t{0}](Value& out) mutable {
    if (!items) {
      items = to_vector(runtime, input);
      if (slices == 0) fail("division by zero");
    }
    if (number >= slices) return false;
    runtime.step();
    const int64_t length = static_cast<int64_t>(items->size());
    const bool has_extra = number < length % slices;
    const size_t end = offset + static_cast<size_t>(length / slices) + (has_extra ? 1 : 0);
    std::vector<Value> part(items->begin() + static_cast<int64_t>(offset),
                            items->begin() + static_cast<int64_t>(end));
    if (fill && !has_extra) part.push_back(*fill);
    offset = end;
    ++number;
    out = runtime.list(std::move(part));
    return true;
  });
}

constexpr NamedFilter kFilters[] = {
    {"batch", batch},   {"count", length},     {"dictsort", dict_sort},
    {"first", first},   {"groupby", group_by}, {"join", join},
    {"last", last},     {"length", length},    {"list", to_list},
    {"max", largest},   {"min", smallest},     {"reverse", reverse},
    {"slice", slice},   {"sort", sort},        {"sum", sum},
    {"unique", unique},
};

}  // namespace

Filter find_sequence_filter(std::string_view name) {
  for (const NamedFilter& entry : kFilters) {
    if (entry.name == name) return entry.filter;
  }
  return nullptr;
}

}  // namespace nibble::jinja
