// The values of a template: Python's, as far as chat templates see them.
//
// Memory: every object of a rendering belongs to one Heap and lives until the rendering ends; values hold
// plain pointers. So cycles (a namespace inside itself) cannot leak, no destructor recurses, and one number
// bounds the memory of an untrusted template.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/chat_template.h"

namespace nibble::jinja {

// The one exception of this implementation; ChatTemplate turns it into a Status. Line 0 is "the line that is
// being rendered".
struct Error {
  std::string message;
  int line = 0;
};
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error{fmt::format(format, std::forward<Args>(args)...)};
}

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kView,  // dict.keys(), dict.values(), dict.items()
  kNamespace,
  kRange,
  kIterator,  // runs once: what map, select and the like return
  kFunction,
  kMacro,
  kLoop,
  kCycler,
};

struct Object {
  virtual ~Object() = default;
};
struct String;
struct List;
struct Dict;
struct View;
struct Range;
struct Undefined;
struct Iterator;
struct Function;
struct Loop;
struct Cycler;

class Value {
 public:
  Value() : kind_(Kind::kNone), int_(0) {}
  explicit Value(bool b) : kind_(Kind::kBool), int_(b ? 1 : 0) {}
  explicit Value(int64_t i) : kind_(Kind::kInt), int_(i) {}
  explicit Value(double f) : kind_(Kind::kFloat), float_(f) {}
  Value(Kind kind, Object* object) : kind_(kind), object_(object) {}

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_integer() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }  // Python: bool is an int
  bool is_number() const { return is_integer() || kind_ == Kind::kFloat; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }

  int64_t as_int() const { return int_; }  // REQUIRES is_integer()
  double as_float() const { return kind_ == Kind::kFloat ? float_ : static_cast<double>(int_); }
  Object* object() const { return object_; }

  // REQUIRE the kind that they name.
  inline const String& string() const;
  inline const std::string& text() const;
  inline const std::vector<Value>& items() const;  // list or tuple
  inline Dict& dict() const;                       // dict or namespace
  template <class T>
  T& as() const {
    return *static_cast<T*>(object_);
  }

 private:
  Kind kind_;
  union {
    int64_t int_;
    double float_;
    Object* object_;
  };
};

struct String : Object {
  std::string text;
  bool markup = false;  // markupsafe.Markup: what `safe` and `escape` return
  int64_t length = 0;   // in code points
};
struct List : Object {  // also a tuple
  std::vector<Value> items;
  bool group = false;  // what groupby returns: a tuple whose parts are `grouper` and `list`
};
struct Undefined : Object {
  std::string message;
};
struct Range : Object {
  int64_t start = 0, stop = 0, step = 1, length = 0;
};
struct View : Object {
  enum class What { kKeys, kValues, kItems };
  Dict* dict = nullptr;
  What what = What::kKeys;
};
struct Iterator : Object {
  std::function<bool(Value&)> next;  // false at the end
};
struct Cycler : Object {
  std::vector<Value> items;
  size_t position = 0;
};

class Runtime;

// Keeps the order of insertion. Keys are hashable values; 1, 1.0 and true are one key, as in Python.
struct Dict : Object {
  std::vector<std::pair<Value, Value>> entries;

  // Null where there is none. Throws for a key that cannot be hashed.
  const Value* find(Runtime& runtime, const Value& key);
  const Value* find(Runtime& runtime, std::string_view key);
  void set(Runtime& runtime, const Value& key, const Value& value);

 private:
  std::optional<size_t> locate(Runtime& runtime, const Value& key, size_t hash);
  std::unordered_multimap<size_t, size_t> index_;  // hash -> entry, once there are many
};

struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};
struct Function : Object {
  std::string name;
  std::function<Value(Runtime&, Args&)> call;
  std::vector<std::pair<std::string, Value>> attributes;  // of a macro
};

inline const String& Value::string() const { return as<String>(); }
inline const std::string& Value::text() const { return as<String>().text; }
inline const std::vector<Value>& Value::items() const { return as<List>().items; }
inline Dict& Value::dict() const { return as<Dict>(); }

class Heap {
 public:
  explicit Heap(int64_t max_bytes) : max_bytes_(max_bytes) {}

  template <class T>
  T* make() {
    charge(static_cast<int64_t>(sizeof(T)) + kObjectOverheadBytes);
    auto object = std::make_unique<T>();
    T* pointer = object.get();
    objects_.push_back(std::move(object));
    return pointer;
  }
  // Counts bytes against the limit; call before allocating them.
  void charge(int64_t bytes);

 private:
  static constexpr int64_t kObjectOverheadBytes = 32;  // the pointer here and the allocator's header
  int64_t max_bytes_;
  int64_t used_bytes_ = 0;
  std::vector<std::unique_ptr<Object>> objects_;
};

// What one rendering may use, and where its values live.
class Runtime {
 public:
  Runtime(const TemplateLimits& limits, const std::tm* now)
      : limits(limits), now(now), heap_(limits.max_memory_bytes), steps_left_(limits.max_steps) {}

  const TemplateLimits& limits;
  const std::tm* now;  // null: the clock of this machine
  int line = 0;        // of the node that is being evaluated

  Heap& heap() { return heap_; }
  void step(int64_t count = 1) {
    steps_left_ -= count;
    if (steps_left_ < 0) fail_steps();
  }
  // Work on `bytes` of text.
  void step_bytes(size_t bytes) { step(1 + static_cast<int64_t>(bytes / kBytesPerStep)); }

  Value string(std::string text, bool markup = false);
  Value list(std::vector<Value> items);
  Value tuple(std::vector<Value> items);
  Value undefined(std::string message);
  Value function(std::string name, std::function<Value(Runtime&, Args&)> call);
  Value iterator(std::function<bool(Value&)> next);
  Dict* dict();

  // One level of recursion, for as long as it lives.
  class Level {
   public:
    explicit Level(Runtime& runtime) : runtime_(runtime) {
      if (++runtime_.depth_ > kLevelsPerDepth * runtime_.limits.max_depth) runtime_.fail_depth();
    }
    ~Level() { --runtime_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Runtime& runtime_;
  };

 private:
  // A macro call is some nested nodes (output, call, body, if, for); this many are one step of max_depth.
  static constexpr int kLevelsPerDepth = 5;
  static constexpr size_t kBytesPerStep = 256;  // about what an evaluated node costs
  [[noreturn]] void fail_steps() const;
  [[noreturn]] void fail_depth() const;

  Heap heap_;
  int64_t steps_left_;
  int depth_ = 0;
};

// ---- jinja_value.cc
std::string_view type_name(const Value& value);  // as Python spells it
bool truthy(const Value& value);
// An iterator over anything that Python iterates; an error for the rest.
Iterator& iterate(Runtime& runtime, const Value& value);
std::vector<Value> to_vector(Runtime& runtime, const Value& value);
std::optional<int64_t> length_of(const Value& value);                // len(), where there is one
Value element(Runtime& runtime, const Value& value, int64_t index);  // REQUIRES 0 <= index < length_of(value)
// An integer argument; an error names `what`.
int64_t int_argument(const Value& value, std::string_view what);
const std::string& string_argument(const Value& value, std::string_view what);
// The values of the parameters `names` (split at spaces); the first `required` must be given.
std::vector<std::optional<Value>> bind_args(std::string_view function, const Args& args,
                                            std::string_view names, size_t required);
void reject_undefined(const Value& value);  // throws what Python's Undefined throws when it is used

// ---- jinja_compare.cc
bool equals(Runtime& runtime, const Value& a, const Value& b);
bool less_than(Runtime& runtime, const Value& a, const Value& b);
bool contains(Runtime& runtime, const Value& container, const Value& item);
size_t hash_of(Runtime& runtime, const Value& value);
bool is_same(const Value& a, const Value& b);  // Python's `is`, as far as it is defined

// ---- jinja_print.cc
std::string to_str(Runtime& runtime, const Value& value);   // str()
std::string to_repr(Runtime& runtime, const Value& value);  // repr()
std::string float_repr(double value);
struct JsonStyle {
  bool ensure_ascii = false, sort_keys = false;
  std::optional<std::string> indent;
  std::string item_separator = ", ", key_separator = ": ";
};
std::string to_json(Runtime& runtime, const Value& value, const JsonStyle& style);
std::string escape_html(std::string_view text);

// ---- jinja_operators.cc
enum class Operator : uint8_t { kAdd, kSub, kMul, kDiv, kFloorDiv, kMod, kPow };
Value binary(Runtime& runtime, Operator op, const Value& a, const Value& b);
Value negate(const Value& value);
Value get_item(Runtime& runtime, const Value& object, const Value& key);
Value get_attribute(Runtime& runtime, const Value& object, const std::string& name);
Value get_slice(Runtime& runtime, const Value& object, const Value& start, const Value& stop,
                const Value& step);
Value call(Runtime& runtime, const Value& callee, Args& args);

// ---- jinja_loop.cc
Value loop_attribute(Runtime& runtime, const Value& loop, const std::string& name);

// ---- jinja_format.cc
std::string percent_format(Runtime& runtime, const std::string& format, const Value& argument);
std::string brace_format(Runtime& runtime, const std::string& format, const Args& args);

// ---- jinja_methods.cc
// The method of a string, list, tuple or dict; nothing where Python has none of this name.
std::optional<Value> find_method(Runtime& runtime, const Value& object, const std::string& name);
std::vector<std::string_view> split_lines(std::string_view text);
std::string replace_all(Runtime& runtime, std::string_view text, std::string_view from, std::string_view to,
                        int64_t count);

// ---- jinja_filters*.cc, jinja_tests.cc, jinja_globals.cc
using Filter = Value (*)(Runtime&, const Value&, const Args&);
using Test = bool (*)(Runtime&, const Value&, const Args&);
Filter find_filter(std::string_view name);  // null for none
Test find_test(std::string_view name);
std::optional<Value> find_global(Runtime& runtime, std::string_view name);

}  // namespace nibble::jinja
