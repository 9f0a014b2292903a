// The variable `loop` of a for.
#pragma once

#include <optional>

#include "text/jinja_value.h"

namespace nibble::jinja {

// Looks one item ahead where the template asks whether this is the last one, and reads everything where it
// asks for the length of something that has none, as Jinja does.
struct Loop : Object {
  Value iterable;
  Iterator* iterator = nullptr;
  int64_t index0 = -1;
  Value current, before;
  std::optional<Value> after;
  std::optional<int64_t> length;
  std::optional<Value> last_changed;

  bool advance(Value& item);
  bool peek();
  int64_t get_length(Runtime& runtime);
};

}  // namespace nibble::jinja
