// The names that every template knows: Jinja's, and the two that transformers adds.
#include <ctime>

#include "text/jinja_unicode.h"
#include "text/jinja_value.h"

namespace nibble::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;  // of Jinja's sandbox
constexpr size_t kMaxTimeBytes = 4096;  // what one strftime_now may give

Value make_range(Runtime& runtime, Args& args) {
  if (!args.named.empty()) fail("range() takes no keyword arguments");
  const auto bound = bind_args("range()", args, "start stop step", 1);
  const int64_t first = int_argument(*bound[0], "range(): an argument");
  const int64_t start = bound[1] ? first : 0;
  const int64_t stop = bound[1] ? int_argument(*bound[1], "range(): stop") : first;
  const int64_t step = bound[2] ? int_argument(*bound[2], "range(): step") : 1;
  if (step == 0) fail("range() arg 3 must not be zero");
  __extension__ using Wide = __int128;
  const Wide span = step > 0 ? Wide(stop) - start : Wide(start) - stop;
  const Wide stride = step > 0 ? Wide(step) : -Wide(step);
  const Wide length = span <= 0 ? Wide(0) : (span - 1) / stride + 1;
  if (length > kMaxRange) fail("a range of more than {} items", kMaxRange);
  auto* range = runtime.heap().make<Range>();
  range->start = start;
  range->stop = stop;
  range->step = step;
  range->length = static_cast<int64_t>(length);
  return {Kind::kRange, range};
}

// dict(...) and namespace(...): a mapping or pairs, then named arguments.
Dict* fill_dict(Runtime& runtime, const Args& args) {
  if (args.positional.size() > 1) fail("expected at most 1 argument, got {}", args.positional.size());
  Dict* out = runtime.dict();
  if (!args.positional.empty() && args.positional[0].is(Kind::kDict)) {
    for (const auto& [key, value] : args.positional[0].dict().entries) {
      runtime.step();
      out->set(runtime, key, value);
    }
  } else if (!args.positional.empty()) {
    reject_undefined(args.positional[0]);
    for (const Value& pair : to_vector(runtime, args.positional[0])) {
      const std::vector<Value> parts = to_vector(runtime, pair);
      if (parts.size() != 2) fail("a pair for a dict has {} parts", parts.size());
      out->set(runtime, parts[0], parts[1]);
    }
  }
  for (const auto& [name, value] : args.named) out->set(runtime, runtime.string(name), value);
  return out;
}
Value make_dict(Runtime& runtime, Args& args) { return {Kind::kDict, fill_dict(runtime, args)}; }
Value make_namespace(Runtime& runtime, Args& args) { return {Kind::kNamespace, fill_dict(runtime, args)}; }

Value make_cycler(Runtime& runtime, Args& args) {
  if (!args.named.empty()) fail("cycler() takes no keyword arguments");
  if (args.positional.empty()) fail("at least one item has to be provided");
  auto* cycler = runtime.heap().make<Cycler>();
  runtime.heap().charge(static_cast<int64_t>(args.positional.size() * sizeof(Value)));
  cycler->items = args.positional;
  return {Kind::kCycler, cycler};
}

Value make_joiner(Runtime& runtime, Args& args) {
  const auto bound = bind_args("joiner()", args, "sep", 0);
  const Value separator = bound[0] ? *bound[0] : runtime.string(", ");
  return runtime.function("joiner", [separator, used = false](Runtime& inner, Args& none) mutable {
    bind_args("a joiner", none, "", 0);
    if (used) return separator;
    used = true;
    return inner.string("");
  });
}

Value raise_exception(Runtime& runtime, Args& args) {
  const auto bound = bind_args("raise_exception()", args, "message", 1);
  throw Error{to_str(runtime, *bound[0])};
}

std::tm local_now() {
  const std::time_t now = std::time(nullptr);
  std::tm out{};
  localtime_r(&now, &out);
  return out;
}

Value strftime_now(Runtime& runtime, Args& args) {
  const auto bound = bind_args("strftime_now()", args, "format", 1);
  // datetime.now() has no zone, and its microseconds are nobody's business in a prompt.
  std::string format = string_argument(*bound[0], "strftime_now(): format");
  format = replace_all(runtime, format, "%z", "", -1);
  format = replace_all(runtime, format, "%Z", "", -1);
  format = replace_all(runtime, format, "%f", "000000", -1);
  format += ' ';  // so that a result of 0 bytes means "too long"
  if (format.find('\0') != std::string::npos) fail("strftime_now(): the format has a NUL");
  const std::tm now = runtime.now != nullptr ? *runtime.now : local_now();
  std::string out(kMaxTimeBytes, '\0');
  out.resize(std::strftime(out.data(), out.size(), format.c_str(), &now));
  if (out.empty()) fail("strftime_now(): the result is longer than {} bytes", kMaxTimeBytes);
  out.pop_back();
  if (!is_valid_utf8(out)) fail("strftime_now(): the result is not UTF-8");
  return runtime.string(std::move(out));
}

struct Named {
  std::string_view name;
  Value (*call)(Runtime&, Args&);
};
constexpr Named kGlobals[] = {
    {"range", make_range},          {"dict", make_dict},     {"namespace", make_namespace},
    {"cycler", make_cycler},        {"joiner", make_joiner}, {"raise_exception", raise_exception},
    {"strftime_now", strftime_now},
};

}  // namespace

std::optional<Value> find_global(Runtime& runtime, std::string_view name) {
  for (const Named& entry : kGlobals) {
    if (entry.name == name) return runtime.function(std::string(name), entry.call);
  }
  return std::nullopt;
}

}  // namespace nibble::jinja
