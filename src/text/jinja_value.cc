#include "text/jinja_value.h"

#include <algorithm>

#include "text/jinja_unicode.h"

namespace nibble::jinja {

void Heap::charge(int64_t bytes) {
  if (bytes < 0 || bytes > max_bytes_ - used_bytes_) {
    fail("the values of the template take more than {} bytes", max_bytes_);
  }
  used_bytes_ += bytes;
}

void Runtime::fail_steps() const { fail("the template takes more than {} steps", limits.max_steps); }
void Runtime::fail_depth() const {
  fail("evaluation is nested too deep (the limit is {} levels of macros)", limits.max_depth);
}

Value Runtime::string(std::string text, bool markup) {
  step_bytes(text.size());
  heap_.charge(static_cast<int64_t>(text.size()));
  auto* string = heap_.make<String>();
  string->length = count_code_points(text);
  string->text = std::move(text);
  string->markup = markup;
  return {Kind::kString, string};
}

Value Runtime::list(std::vector<Value> items) {
  heap_.charge(static_cast<int64_t>(items.size() * sizeof(Value)));
  step(1 + static_cast<int64_t>(items.size() / 16));
  auto* list = heap_.make<List>();
  list->items = std::move(items);
  return {Kind::kList, list};
}

Value Runtime::tuple(std::vector<Value> items) { return {Kind::kTuple, list(std::move(items)).object()}; }

Value Runtime::undefined(std::string message) {
  heap_.charge(static_cast<int64_t>(message.size()));
  auto* undefined = heap_.make<Undefined>();
  undefined->message = std::move(message);
  return {Kind::kUndefined, undefined};
}

Value Runtime::function(std::string name, std::function<Value(Runtime&, Args&)> call) {
  auto* function = heap_.make<Function>();
  function->name = std::move(name);
  function->call = std::move(call);
  return {Kind::kFunction, function};
}

Value Runtime::iterator(std::function<bool(Value&)> next) {
  auto* iterator = heap_.make<Iterator>();
  iterator->next = std::move(next);
  return {Kind::kIterator, iterator};
}

Dict* Runtime::dict() { return heap_.make<Dict>(); }

// ---- dicts

namespace {
constexpr size_t kLinearEntries = 8;  // up to here a search is faster than a hash table
constexpr int64_t kEntryBytes = 2 * sizeof(Value) + 40;
}  // namespace

std::optional<size_t> Dict::locate(Runtime& runtime, const Value& key, size_t hash) {
  if (entries.size() <= kLinearEntries) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (equals(runtime, entries[i].first, key)) return i;
    }
    return std::nullopt;
  }
  for (size_t i = index_.size(); i < entries.size(); ++i) {
    index_.emplace(hash_of(runtime, entries[i].first), i);
  }
  const auto [begin, end] = index_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    runtime.step();
    if (equals(runtime, entries[it->second].first, key)) return it->second;
  }
  return std::nullopt;
}

const Value* Dict::find(Runtime& runtime, const Value& key) {
  const auto found = locate(runtime, key, hash_of(runtime, key));
  return found ? &entries[*found].second : nullptr;
}

const Value* Dict::find(Runtime& runtime, std::string_view key) {
  if (entries.size() > kLinearEntries) {
    String probe;
    probe.text = key;
    return find(runtime, Value(Kind::kString, &probe));
  }
  for (const auto& [name, value] : entries) {
    if (name.is(Kind::kString) && name.text() == key) return &value;
  }
  return nullptr;
}

void Dict::set(Runtime& runtime, const Value& key, const Value& value) {
  const auto found = locate(runtime, key, hash_of(runtime, key));
  if (found) {
    entries[*found].second = value;
    return;
  }
  runtime.heap().charge(kEntryBytes);
  entries.emplace_back(key, value);
}

// ---- what Python asks of any value

std::string_view type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return value.string().markup ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kView:
      switch (value.as<View>().what) {
        case View::What::kKeys:
          return "dict_keys";
        case View::What::kValues:
          return "dict_values";
        case View::What::kItems:
          return "dict_items";
      }
      return "dict_view";
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kRange:
      return "range";
    case Kind::kIterator:
      return "generator";
    case Kind::kFunction:
      return "function";
    case Kind::kMacro:
      return "Macro";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kCycler:
      return "Cycler";
  }
  return "object";
}

std::optional<int64_t> length_of(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return value.string().length;
    case Kind::kList:
    case Kind::kTuple:
      return static_cast<int64_t>(value.items().size());
    case Kind::kDict:
      return static_cast<int64_t>(value.dict().entries.size());
    case Kind::kView:
      return static_cast<int64_t>(value.as<View>().dict->entries.size());
    case Kind::kRange:
      return value.as<Range>().length;
    default:
      return std::nullopt;
  }
}

bool truthy(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return value.as_int() != 0;
    case Kind::kFloat:
      return value.as_float() != 0;
    default:
      return length_of(value).value_or(1) != 0;
  }
}

Value element(Runtime& runtime, const Value& value, int64_t index) {
  const auto at = static_cast<size_t>(index);
  switch (value.kind()) {
    case Kind::kString: {
      const std::string& text = value.text();
      const bool ascii = value.string().length == static_cast<int64_t>(text.size());
      if (!ascii) runtime.step_bytes(at);
      const size_t begin = ascii ? at : byte_offset(text, index);
      size_t end = begin;
      next_code_point(text, end);
      return runtime.string(text.substr(begin, end - begin), value.string().markup);
    }
    case Kind::kList:
    case Kind::kTuple:
      return value.items()[at];
    case Kind::kDict:
      return value.dict().entries[at].first;
    case Kind::kView: {
      const View& view = value.as<View>();
      const auto& [key, item] = view.dict->entries[at];
      if (view.what == View::What::kKeys) return key;
      if (view.what == View::What::kValues) return item;
      return runtime.tuple({key, item});
    }
    case Kind::kRange: {
      const Range& range = value.as<Range>();
      return Value(range.start + index * range.step);
    }
    default:
      return {};
  }
}

Iterator& iterate(Runtime& runtime, const Value& value) {
  if (value.is(Kind::kIterator)) return value.as<Iterator>();
  if (!length_of(value)) fail("'{}' object is not iterable", type_name(value));
  if (value.is(Kind::kString)) {  // by byte position, so that each character costs the same
    return runtime
        .iterator([&runtime, value, position = size_t{0}](Value& out) mutable {
          const std::string& text = value.text();
          if (position >= text.size()) return false;
          const size_t begin = position;
          next_code_point(text, position);
          out = runtime.string(text.substr(begin, position - begin));  // plain, of escaped text, too
          return true;
        })
        .as<Iterator>();
  }
  return runtime
      .iterator([&runtime, value, index = int64_t{0}](Value& out) mutable {
        if (index >= *length_of(value)) return false;
        out = element(runtime, value, index++);
        return true;
      })
      .as<Iterator>();
}

std::vector<Value> to_vector(Runtime& runtime, const Value& value) {
  std::vector<Value> out;
  if (value.is_sequence()) {
    out = value.items();
    runtime.step(1 + static_cast<int64_t>(out.size() / 16));
    return out;
  }
  Iterator& iterator = iterate(runtime, value);
  for (Value item; iterator.next(item);) {
    runtime.step();
    out.push_back(item);
  }
  return out;
}

void reject_undefined(const Value& value) {
  if (value.is(Kind::kUndefined)) throw Error{value.as<Undefined>().message};
}

// ---- arguments

int64_t int_argument(const Value& value, std::string_view what) {
  if (!value.is_integer()) fail("{} must be an integer, not '{}'", what, type_name(value));
  return value.as_int();
}

const std::string& string_argument(const Value& value, std::string_view what) {
  if (!value.is(Kind::kString)) fail("{} must be a string, not '{}'", what, type_name(value));
  return value.text();
}

std::vector<std::optional<Value>> bind_args(std::string_view function, const Args& args,
                                            std::string_view names, size_t required) {
  std::vector<std::string_view> parameters;
  while (!names.empty()) {
    const size_t space = std::min(names.find(' '), names.size());
    parameters.push_back(names.substr(0, space));
    names.remove_prefix(std::min(space + 1, names.size()));
  }
  if (args.positional.size() > parameters.size()) {
    fail("{} takes at most {} arguments, {} are given", function, parameters.size(), args.positional.size());
  }
  std::vector<std::optional<Value>> bound(args.positional.begin(), args.positional.end());
  bound.resize(parameters.size());
  for (const auto& [name, value] : args.named) {
    const auto found = std::find(parameters.begin(), parameters.end(), name);
    if (found == parameters.end()) fail("{} takes no argument '{}'", function, name);
    auto& slot = bound[static_cast<size_t>(found - parameters.begin())];
    if (slot) fail("{} is given argument '{}' twice", function, name);
    slot = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!bound[i]) fail("{} needs argument '{}'", function, parameters[i]);
  }
  return bound;
}

}  // namespace nibble::jinja
