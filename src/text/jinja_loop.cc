#include "text/jinja_loop.h"

namespace nibble::jinja {

bool Loop::advance(Value& item) {
  if (after) {
    item = *after;
    after.reset();
  } else if (!iterator->next(item)) {
    return false;
  }
  ++index0;
  before = current;
  current = item;
  return true;
}

bool Loop::peek() {
  if (after) return true;
  Value item;
  if (!iterator->next(item)) return false;
  after = item;
  return true;
}

int64_t Loop::get_length(Runtime& runtime) {
  if (length) return *length;
  length = length_of(iterable);
  if (!length) {
    const Value rest = runtime.list(to_vector(runtime, Value(Kind::kIterator, iterator)));
    iterator = &iterate(runtime, rest);
    length = static_cast<int64_t>(rest.items().size()) + index0 + 1 + (after ? 1 : 0);
  }
  return *length;
}

Value loop_attribute(Runtime& runtime, const Value& value, const std::string& name) {
  auto* loop = &value.as<Loop>();
  if (name == "index") return Value(loop->index0 + 1);
  if (name == "index0") return Value(loop->index0);
  if (name == "first") return Value(loop->index0 == 0);
  if (name == "last") return Value(!loop->peek());
  if (name == "length") return Value(loop->get_length(runtime));
  if (name == "revindex") return Value(loop->get_length(runtime) - loop->index0);
  if (name == "revindex0") return Value(loop->get_length(runtime) - loop->index0 - 1);
  if (name == "depth") return Value(int64_t{1});
  if (name == "depth0") return Value(int64_t{0});
  if (name == "previtem") {
    return loop->index0 == 0 ? runtime.undefined("there is no previous item") : loop->before;
  }
  if (name == "nextitem") return loop->peek() ? *loop->after : runtime.undefined("there is no next item");
  if (name == "cycle") {
    return runtime.function(name, [loop](Runtime&, Args& args) {
      if (!args.named.empty()) fail("loop.cycle takes no named arguments");
      if (args.positional.empty()) fail("no items for cycling given");
      return args.positional[static_cast<size_t>(loop->index0) % args.positional.size()];
    });
  }
  if (name == "changed") {
    return runtime.function(name, [loop](Runtime& inner, Args& args) {
      if (!args.named.empty()) fail("loop.changed takes no named arguments");
      const Value now = inner.tuple(args.positional);
      const bool changed = !loop->last_changed || !equals(inner, *loop->last_changed, now);
      loop->last_changed = now;
      return Value(changed);
    });
  }
  return runtime.undefined(fmt::format("'loop' has no attribute '{}'", name));
}

}  // namespace nibble::jinja
