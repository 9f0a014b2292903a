// Statements, scopes and macros.
#include "text/jinja_render.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "text/jinja_loop.h"
#include "text/jinja_unicode.h"

namespace nibble::jinja {

std::string Renderer::render(const nlohmann::ordered_json& context) {
  if (!context.is_object()) fail("the context of a template must be a JSON object");
  for (const auto& [name, value] : context.items()) {
    const NameId id = ast_.find(name);
    if (id < 0) continue;  // the template does not ask for it
    if (static_cast<size_t>(id) >= context_.size()) context_.resize(static_cast<size_t>(id) + 1);
    context_[static_cast<size_t>(id)] = from_json(value);
  }
  std::string out;
  run(ast_.body, *new_scope(nullptr), out);
  return out;
}

Value Renderer::from_json(const nlohmann::ordered_json& json) {
  using Type = nlohmann::ordered_json::value_t;
  const Runtime::Level level(runtime_);
  switch (json.type()) {
    case Type::boolean:
      return Value(json.get<bool>());
    case Type::number_integer:
      return Value(json.get<int64_t>());
    case Type::number_unsigned:
      if (json.get<uint64_t>() > INT64_MAX)
        fail("integer {} of the context does not fit 64 bits", json.get<uint64_t>());
      return Value(json.get<int64_t>());
    case Type::number_float:
      return Value(json.get<double>());
    case Type::string: {
      const auto& text = json.get_ref<const std::string&>();
      if (!is_valid_utf8(text)) fail("a string of the context is not UTF-8");
      return runtime_.string(text);
    }
    case Type::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(from_json(item));
      return runtime_.list(std::move(items));
    }
    case Type::object: {
      Dict* dict = runtime_.dict();
      for (const auto& [key, value] : json.items()) {
        if (!is_valid_utf8(key)) fail("a key of the context is not UTF-8");
        dict->set(runtime_, runtime_.string(key), from_json(value));
      }
      return {Kind::kDict, dict};
    }
    default:
      return {};
  }
}

// ---- names

Renderer::Scope* Renderer::new_scope(Scope* parent) {
  runtime_.heap().charge(sizeof(Scope));
  Scope& scope = scopes_.emplace_back();
  scope.parent = parent;
  return &scope;
}

void Renderer::set(Scope& scope, NameId name, const Value& value) {
  for (auto& [known, slot] : scope.values) {
    if (known != name) continue;
    slot = value;
    return;
  }
  runtime_.heap().charge(sizeof(scope.values[0]));
  scope.values.emplace_back(name, value);
}

Value Renderer::lookup(const Scope& scope, NameId name, const std::string& text) {
  for (const Scope* at = &scope; at != nullptr; at = at->parent) {
    for (const auto& [known, value] : at->values) {
      if (known == name) return value;
    }
  }
  const auto slot = static_cast<size_t>(name);
  if (slot < context_.size() && context_[slot]) return *context_[slot];
  if (const auto global = find_global(runtime_, text)) return *global;
  return runtime_.undefined(fmt::format("'{}' is undefined", text));
}

void Renderer::assign(Scope& scope, const Expr& target, const Value& value) {
  if (target.kind == ExprKind::kName) return set(scope, target.name, value);
  runtime_.line = target.line;
  if (target.kind == ExprKind::kNamespaceTarget) {
    const Value space = lookup(scope, target.name, ast_.name(target.name));
    if (!space.is(Kind::kNamespace))
      fail("cannot assign an attribute of '{}': it is no namespace", ast_.name(target.name));
    space.dict().set(runtime_, runtime_.string(target.text), value);
    return;
  }
  const size_t wanted = target.children.size();
  std::vector<Value> parts;
  Iterator& iterator = iterate(runtime_, value);
  for (Value part; parts.size() <= wanted && iterator.next(part);) parts.push_back(part);
  if (parts.size() < wanted) fail("not enough values to unpack (expected {}, got {})", wanted, parts.size());
  if (parts.size() > wanted) fail("too many values to unpack (expected {})", wanted);
  for (size_t i = 0; i < wanted; ++i) assign(scope, *target.children[i], parts[i]);
}

// ---- output

void Renderer::write(std::string& out, std::string_view text) {
  if (static_cast<int64_t>(text.size()) >
      runtime_.limits.max_output_bytes - static_cast<int64_t>(out.size())) {
    fail("the output is longer than {} bytes", runtime_.limits.max_output_bytes);
  }
  runtime_.step_bytes(text.size());
  out += text;
}

void Renderer::write(std::string& out, const Value& value) {
  if (value.is(Kind::kString)) return write(out, std::string_view(value.text()));
  write(out, std::string_view(to_str(runtime_, value)));
}

// ---- statements

Renderer::Flow Renderer::run(const Block& block, Scope& scope, std::string& out) {
  for (const Stmt* stmt : block) {
    const Flow flow = run(*stmt, scope, out);
    if (flow != Flow::kOn) return flow;
  }
  return Flow::kOn;
}

Renderer::Flow Renderer::run(const Stmt& stmt, Scope& scope, std::string& out) {
  runtime_.step();
  const Runtime::Level level(runtime_);
  runtime_.line = stmt.line;
  switch (stmt.kind) {
    case StmtKind::kText:
      write(out, std::string_view(stmt.text));
      break;
    case StmtKind::kOutput:
      write(out, eval(*stmt.value, scope));
      break;
    case StmtKind::kFor:
      return run_for(stmt, scope, out);
    case StmtKind::kIf:
      return run_if(stmt, scope, out);
    case StmtKind::kSet:
      assign(scope, *stmt.target, eval(*stmt.value, scope));
      break;
    case StmtKind::kSetBlock:
    case StmtKind::kFilterBlock:
      return run_captured(stmt, scope, out);
    case StmtKind::kMacro:
      set(scope, stmt.macro.name, make_macro(stmt, scope));
      break;
    case StmtKind::kCallBlock:
      run_call_block(stmt, scope, out);
      break;
    case StmtKind::kScope:
      return run_scope(stmt, scope, out);
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kOn;
}

Renderer::Flow Renderer::run_if(const Stmt& first, Scope& scope, std::string& out) {
  const Stmt* stmt = &first;
  while (!truthy(eval(*stmt->condition, scope))) {
    const bool chain = stmt->otherwise.size() == 1 && stmt->otherwise[0]->kind == StmtKind::kIf;
    if (!chain) return run(stmt->otherwise, scope, out);
    stmt = stmt->otherwise[0];
  }
  return run(stmt->body, scope, out);
}

Renderer::Flow Renderer::run_for(const Stmt& stmt, Scope& scope, std::string& out) {
  Value iterable = eval(*stmt.value, scope);
  runtime_.line = stmt.line;
  Iterator* iterator = &iterate(runtime_, iterable);
  if (stmt.condition != nullptr) {
    Scope* test_scope = new_scope(&scope);
    iterable = runtime_.iterator([this, &stmt, test_scope, iterator](Value& item) {
      while (iterator->next(item)) {
        test_scope->values.clear();
        assign(*test_scope, *stmt.target, item);
        if (truthy(eval(*stmt.condition, *test_scope))) return true;
      }
      return false;
    });
    iterator = &iterable.as<Iterator>();
  }
  auto* loop = runtime_.heap().make<Loop>();
  loop->iterable = iterable;
  loop->iterator = iterator;
  const NameId loop_name = ast_.find("loop");
  Scope* body_scope = new_scope(&scope);
  bool run_otherwise = true;  // until a body ran to its end: neither break nor continue counts, as in Jinja
  for (Value item; loop->advance(item);) {
    runtime_.step();
    body_scope->values.clear();
    if (loop_name >= 0) set(*body_scope, loop_name, Value(Kind::kLoop, loop));
    assign(*body_scope, *stmt.target, item);
    const Flow flow = run(stmt.body, *body_scope, out);
    if (flow == Flow::kBreak) break;
    if (flow == Flow::kOn) run_otherwise = false;
    runtime_.line = stmt.line;
  }
  return run_otherwise ? run(stmt.otherwise, *new_scope(&scope), out) : Flow::kOn;
}

Renderer::Flow Renderer::run_captured(const Stmt& stmt, Scope& scope, std::string& out) {
  Scope* inner = new_scope(&scope);
  std::string text;
  const Flow flow = run(stmt.body, *inner, text);
  if (flow != Flow::kOn) return flow;
  Value value = runtime_.string(std::move(text));
  if (stmt.value != nullptr) value = eval_filter(*stmt.value, *inner, &value);
  if (stmt.kind == StmtKind::kSetBlock) {
    assign(scope, *stmt.target, value);
  } else {
    write(out, std::string_view(string_argument(value, "the result of a filter block")));
  }
  return Flow::kOn;
}

Renderer::Flow Renderer::run_scope(const Stmt& stmt, Scope& scope, std::string& out) {
  Scope* inner = new_scope(&scope);
  for (size_t i = 0; i < stmt.targets.size(); ++i)
    assign(*inner, *stmt.targets[i], eval(*stmt.values[i], scope));
  return run(stmt.body, *inner, out);
}

void Renderer::run_call_block(const Stmt& stmt, Scope& scope, std::string& out) {
  const Value caller = make_macro(stmt, scope);
  const Value result = eval_call(*stmt.value, scope, &caller);
  write(out, std::string_view(string_argument(result, "the result of a call block")));
}

// ---- macros

Value Renderer::make_macro(const Stmt& stmt, Scope& scope) {
  const MacroDef& macro = stmt.macro;
  const Value function = runtime_.function(macro.name_text, [this, &stmt, &scope](Runtime&, Args& args) {
    const Runtime::Level level(runtime_);
    Scope* inner = new_scope(&scope);
    bind_macro(stmt.macro, *inner, args);
    std::string text;
    run(stmt.body, *inner, text);
    return runtime_.string(std::move(text));
  });
  std::vector<Value> names;
  for (const std::string& name : macro.parameter_texts) names.push_back(runtime_.string(name));
  const bool anonymous = stmt.kind == StmtKind::kCallBlock;
  function.as<Function>().attributes = {{"name", anonymous ? Value() : runtime_.string(macro.name_text)},
                                        {"arguments", runtime_.tuple(std::move(names))},
                                        {"caller", Value(macro.uses_caller)},
                                        {"catch_kwargs", Value(macro.uses_kwargs)},
                                        {"catch_varargs", Value(macro.uses_varargs)}};
  return {Kind::kMacro, function.object()};
}

void Renderer::bind_macro(const MacroDef& macro, Scope& scope, Args& args) {
  const auto take_named = [&](std::string_view name) -> std::optional<Value> {
    const auto found = std::find_if(args.named.begin(), args.named.end(),
                                    [&](const auto& arg) { return arg.first == name; });
    if (found == args.named.end()) return std::nullopt;
    const Value value = found->second;
    args.named.erase(found);
    return value;
  };
  const size_t count = macro.parameters.size();
  std::vector<size_t> missing;
  for (size_t i = 0; i < count; ++i) {
    const std::string& name = macro.parameter_texts[i];
    std::optional<Value> value =
        i < args.positional.size() ? std::optional(args.positional[i]) : take_named(name);
    if (!value) missing.push_back(i);
    set(scope, macro.parameters[i],
        value ? *value : runtime_.undefined(fmt::format("parameter '{}' was not provided", name)));
  }
  if (macro.uses_caller) {
    const auto caller = take_named("caller");
    set(scope, ast_.find("caller"), caller ? *caller : runtime_.undefined("No caller defined"));
  }
  if (macro.uses_kwargs) {
    Dict* rest = runtime_.dict();
    for (const auto& [name, value] : args.named) rest->set(runtime_, runtime_.string(name), value);
    set(scope, ast_.find("kwargs"), Value(Kind::kDict, rest));
  } else if (!args.named.empty()) {
    fail("macro '{}' takes no keyword argument '{}'", macro.name_text, args.named[0].first);
  }
  const size_t extra = args.positional.size() > count ? args.positional.size() - count : 0;
  if (macro.uses_varargs) {
    set(scope, ast_.find("varargs"),
        runtime_.tuple({args.positional.end() - static_cast<int64_t>(extra), args.positional.end()}));
  } else if (extra > 0) {
    fail("macro '{}' takes not more than {} argument(s)", macro.name_text, count);
  }
  const size_t without_default = count - macro.defaults.size();
  for (const size_t i : missing) {
    if (i >= without_default)
      set(scope, macro.parameters[i], eval(*macro.defaults[i - without_default], scope));
  }
}

}  // namespace nibble::jinja
