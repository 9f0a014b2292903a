// Expressions.
#include "text/jinja_render.h"

namespace nibble::jinja {

Value Renderer::eval(const Expr& expr, Scope& scope) {
  runtime_.step();
  const Runtime::Level level(runtime_);
  runtime_.line = expr.line;
  return eval_node(expr, scope);
}

std::vector<Value> Renderer::eval_all(const std::vector<Expr*>& exprs, Scope& scope) {
  std::vector<Value> values;
  values.reserve(exprs.size());
  for (const Expr* expr : exprs) values.push_back(eval(*expr, scope));
  return values;
}

Value Renderer::eval_node(const Expr& expr, Scope& scope) {
  const auto child = [&](size_t i) { return eval(*expr.children[i], scope); };
  const auto optional_child = [&](size_t i) { return expr.children[i] != nullptr ? child(i) : Value(); };
  switch (expr.kind) {
    case ExprKind::kConstant:
      return expr.constant;
    case ExprKind::kName:
      return lookup(scope, expr.name, expr.text);
    case ExprKind::kList:
      return runtime_.list(eval_all(expr.children, scope));
    case ExprKind::kTuple:
      return runtime_.tuple(eval_all(expr.children, scope));
    case ExprKind::kDict:
      return eval_dict(expr, scope);
    case ExprKind::kNot:
      return Value(!truthy(child(0)));
    case ExprKind::kNegate:
      return negate(child(0));
    case ExprKind::kPlus: {
      const Value value = child(0);
      reject_undefined(value);
      if (!value.is_number()) fail("bad operand type for unary +: '{}'", type_name(value));
      return value.is(Kind::kBool) ? Value(value.as_int()) : value;
    }
    case ExprKind::kBinary: {
      const Value left = child(0);
      const Value right = child(1);
      runtime_.line = expr.line;
      return binary(runtime_, expr.op, left, right);
    }
    case ExprKind::kConcat: {
      std::string text;
      for (const Value& part : eval_all(expr.children, scope)) write(text, part);
      return runtime_.string(std::move(text));
    }
    case ExprKind::kAnd: {
      const Value left = child(0);
      return truthy(left) ? child(1) : left;
    }
    case ExprKind::kOr: {
      const Value left = child(0);
      return truthy(left) ? left : child(1);
    }
    case ExprKind::kCompare:
      return eval_compare(expr, scope);
    case ExprKind::kIf:
      if (truthy(child(0))) return child(1);
      if (expr.children[2] != nullptr) return child(2);
      return runtime_.undefined("the inline if-expression was false and has no else");
    case ExprKind::kAttribute: {
      const Value object = child(0);
      runtime_.line = expr.line;
      return get_attribute(runtime_, object, expr.text);
    }
    case ExprKind::kItem: {
      const Value object = child(0);
      const Value key = child(1);
      runtime_.line = expr.line;
      return get_item(runtime_, object, key);
    }
    case ExprKind::kSlice: {
      const Value object = child(0);
      const Value start = optional_child(1);
      const Value stop = optional_child(2);
      const Value step = optional_child(3);
      runtime_.line = expr.line;
      return get_slice(runtime_, object, start, stop, step);
    }
    case ExprKind::kCall:
      return eval_call(expr, scope, nullptr);
    case ExprKind::kFilter:
      return eval_filter(expr, scope, nullptr);
    case ExprKind::kTest: {
      const Value value = child(0);
      const Args args = eval_arguments(expr.arguments, scope);
      runtime_.line = expr.line;
      if (expr.test == nullptr) fail("test '{}' is not implemented", expr.text);
      return Value(expr.test(runtime_, value, args));
    }
    case ExprKind::kNamespaceTarget:
      break;
  }
  fail("this expression has no value");
}

Value Renderer::eval_dict(const Expr& expr, Scope& scope) {
  Dict* dict = runtime_.dict();
  for (size_t i = 0; i < expr.children.size(); i += 2) {
    const Value key = eval(*expr.children[i], scope);
    const Value value = eval(*expr.children[i + 1], scope);
    dict->set(runtime_, key, value);
  }
  return {Kind::kDict, dict};
}

Value Renderer::eval_compare(const Expr& expr, Scope& scope) {
  Value left = eval(*expr.children[0], scope);
  for (size_t i = 0; i < expr.comparisons.size(); ++i) {
    const Value right = eval(*expr.children[i + 1], scope);
    runtime_.line = expr.line;
    bool holds = false;
    switch (expr.comparisons[i]) {
      case Comparison::kEq:
        holds = equals(runtime_, left, right);
        break;
      case Comparison::kNe:
        holds = !equals(runtime_, left, right);
        break;
      case Comparison::kLt:
        holds = less_than(runtime_, left, right);
        break;
      case Comparison::kGt:
        holds = less_than(runtime_, right, left);
        break;
      case Comparison::kLe:
        holds = less_than(runtime_, left, right) || equals(runtime_, left, right);
        break;
      case Comparison::kGe:
        holds = less_than(runtime_, right, left) || equals(runtime_, left, right);
        break;
      case Comparison::kIn:
        holds = contains(runtime_, right, left);
        break;
      case Comparison::kNotIn:
        holds = !contains(runtime_, right, left);
        break;
    }
    if (!holds) return Value(false);
    left = right;
  }
  return Value(true);
}

Args Renderer::eval_arguments(const CallArguments& arguments, Scope& scope) {
  Args args;
  args.positional = eval_all(arguments.positional, scope);
  if (arguments.star != nullptr) {
    const std::vector<Value> more = to_vector(runtime_, eval(*arguments.star, scope));
    args.positional.insert(args.positional.end(), more.begin(), more.end());
  }
  for (const auto& [name, expr] : arguments.named) args.named.emplace_back(name, eval(*expr, scope));
  if (arguments.star_star != nullptr) {
    const Value more = eval(*arguments.star_star, scope);
    if (!more.is(Kind::kDict)) fail("argument after ** must be a mapping, not {}", type_name(more));
    for (const auto& [key, value] : more.dict().entries) {
      const std::string& name = string_argument(key, "a keyword");
      for (const auto& earlier : args.named) {
        if (earlier.first == name) fail("keyword argument '{}' is given twice", name);
      }
      runtime_.step(1 + static_cast<int64_t>(args.named.size() / 8));
      args.named.emplace_back(name, value);
    }
  }
  return args;
}

Value Renderer::eval_call(const Expr& expr, Scope& scope, const Value* caller) {
  const Value callee = eval(*expr.children[0], scope);
  Args args = eval_arguments(expr.arguments, scope);
  if (caller != nullptr) args.named.emplace_back("caller", *caller);
  runtime_.line = expr.line;
  return call(runtime_, callee, args);
}

Value Renderer::eval_filter(const Expr& expr, Scope& scope, const Value* block) {
  const Runtime::Level level(runtime_);
  const Expr* input = expr.children[0];
  Value value;
  if (input == nullptr) {
    value = *block;
  } else if (input->kind == ExprKind::kFilter) {
    value = eval_filter(*input, scope, block);
  } else {
    value = eval(*input, scope);
  }
  const Args args = eval_arguments(expr.arguments, scope);
  runtime_.line = expr.line;
  runtime_.step();
  if (expr.filter == nullptr) fail("filter '{}' is not implemented", expr.text);
  return expr.filter(runtime_, value, args);
}

}  // namespace nibble::jinja
