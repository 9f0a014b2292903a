// Expressions, from the loosest binding to the tightest.
#include "text/jinja_parser.h"

#include <algorithm>

namespace nibble::jinja {

// ---- tokens

std::string Parser::describe() const {
  switch (token().kind) {
    case TokenKind::kEnd:
      return "end of template";
    case TokenKind::kData:
      return "text";
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return "a number";
    default:
      return fmt::format("'{}'", token().text);
  }
}

bool Parser::skip_operator(std::string_view spelling) {
  if (!at_operator(spelling)) return false;
  take();
  return true;
}
bool Parser::skip_name(std::string_view name) {
  if (!at_name(name)) return false;
  take();
  return true;
}
void Parser::expect_operator(std::string_view spelling) {
  if (!skip_operator(spelling))
    fail_at(token().line, fmt::format("expected '{}', got {}", spelling, describe()));
}
void Parser::expect_name(std::string_view name) {
  if (!skip_name(name)) fail_at(token().line, fmt::format("expected '{}', got {}", name, describe()));
}
std::string Parser::expect_any_name() {
  if (token().kind != TokenKind::kName)
    fail_at(token().line, fmt::format("expected a name, got {}", describe()));
  return take().text;
}
void Parser::expect_kind(TokenKind kind) {
  if (token().kind != kind) {
    fail_at(token().line,
            fmt::format("expected '{}', got {}", kind == TokenKind::kBlockEnd ? "%}" : "}}", describe()));
  }
  take();
}

// ---- depth

void Parser::fail_depth() const {
  fail_at(token().line, fmt::format("nested deeper than {} levels", limits_.max_depth));
}
void Parser::adopt(int& depth, int child_depth) const {
  depth = std::max(depth, child_depth + 1);
  if (depth > limits_.max_depth) fail_depth();
}
Expr* Parser::add_child(Expr* parent, Expr* child) const {
  ast_->heap.charge(sizeof(void*));
  if (child != nullptr) adopt(parent->depth, child->depth);
  parent->children.push_back(child);
  return parent;
}
Expr* Parser::unary(ExprKind kind, int line, Expr* child) {
  return add_child(ast_->new_expr(kind, line), child);
}
void Parser::adopt_arguments(Expr* expr) const {
  for (const Expr* argument : expr->arguments.positional) adopt(expr->depth, argument->depth);
  for (const auto& [name, argument] : expr->arguments.named) adopt(expr->depth, argument->depth);
  if (expr->arguments.star != nullptr) adopt(expr->depth, expr->arguments.star->depth);
  if (expr->arguments.star_star != nullptr) adopt(expr->depth, expr->arguments.star_star->depth);
}

// ---- expressions

Expr* Parser::parse_expression(bool with_if) {
  const Nest nest(*this);
  return with_if ? parse_if_expression() : parse_or();
}

Expr* Parser::parse_if_expression() {
  const size_t unknown_before = unknown_.size();
  Expr* expr = parse_or();
  while (at_name("if")) {
    const int line = take().line;
    Expr* condition = parse_or();
    Expr* otherwise = nullptr;
    if (skip_name("else")) {
      const Nest nest(*this);
      otherwise = parse_if_expression();
    }
    Expr* choice = unary(ExprKind::kIf, line, condition);
    add_child(choice, expr);
    expr = add_child(choice, otherwise);
    unknown_.resize(unknown_before);
  }
  return expr;
}

Expr* Parser::parse_or() {
  Expr* left = parse_and();
  while (at_name("or")) {
    Expr* both = unary(ExprKind::kOr, take().line, left);
    left = add_child(both, parse_and());
  }
  return left;
}

Expr* Parser::parse_and() {
  Expr* left = parse_not();
  while (at_name("and")) {
    Expr* both = unary(ExprKind::kAnd, take().line, left);
    left = add_child(both, parse_not());
  }
  return left;
}

Expr* Parser::parse_not() {
  if (!at_name("not")) return parse_compare();
  const Nest nest(*this);
  const int line = take().line;
  return unary(ExprKind::kNot, line, parse_not());
}

Expr* Parser::parse_compare() {
  constexpr std::pair<std::string_view, Comparison> kSpellings[] = {
      {"==", Comparison::kEq}, {"!=", Comparison::kNe}, {"<", Comparison::kLt},
      {"<=", Comparison::kLe}, {">", Comparison::kGt},  {">=", Comparison::kGe}};
  Expr* first = parse_sum();
  Expr* compare = nullptr;
  while (true) {
    const Comparison* found = nullptr;
    for (const auto& [spelling, comparison] : kSpellings) {
      if (at_operator(spelling)) found = &comparison;
    }
    Comparison comparison = Comparison::kIn;
    if (found != nullptr) {
      comparison = *found;
    } else if (at_name("not") && peek().kind == TokenKind::kName && peek().text == "in") {
      comparison = Comparison::kNotIn;
      take();
    } else if (!at_name("in")) {
      return compare != nullptr ? compare : first;
    }
    const int line = take().line;
    if (compare == nullptr) compare = unary(ExprKind::kCompare, line, first);
    compare->comparisons.push_back(comparison);
    add_child(compare, parse_sum());
  }
}

Expr* Parser::binary_chain(Expr* (Parser::*operand)(), std::string_view spellings) {
  constexpr std::pair<std::string_view, Operator> kOperators[] = {
      {"+", Operator::kAdd},       {"-", Operator::kSub}, {"*", Operator::kMul}, {"/", Operator::kDiv},
      {"//", Operator::kFloorDiv}, {"%", Operator::kMod}, {"**", Operator::kPow}};
  Expr* left = (this->*operand)();
  while (token().kind == TokenKind::kOperator) {
    const std::string bracketed = " " + token().text + " ";
    if (spellings.find(bracketed) == std::string_view::npos) break;
    Expr* both = unary(ExprKind::kBinary, token().line, left);
    for (const auto& [spelling, op] : kOperators) {
      if (at_operator(spelling)) both->op = op;
    }
    take();
    left = add_child(both, (this->*operand)());
  }
  return left;
}

Expr* Parser::parse_sum() { return binary_chain(&Parser::parse_concat, " + - "); }

Expr* Parser::parse_concat() {
  Expr* first = parse_product();
  if (!at_operator("~")) return first;
  Expr* concat = unary(ExprKind::kConcat, token().line, first);
  while (skip_operator("~")) add_child(concat, parse_product());
  return concat;
}

Expr* Parser::parse_product() { return binary_chain(&Parser::parse_power, " * / // % "); }

Expr* Parser::parse_power() {
  Expr* left = parse_unary(true);
  while (at_operator("**")) {  // to the left, unlike Python
    Expr* both = unary(ExprKind::kBinary, take().line, left);
    both->op = Operator::kPow;
    left = add_child(both, parse_unary(true));
  }
  return left;
}

Expr* Parser::parse_unary(bool with_filter) {
  Expr* expr = nullptr;
  if (at_operator("-") || at_operator("+")) {
    const Nest nest(*this);
    const ExprKind kind = at_operator("-") ? ExprKind::kNegate : ExprKind::kPlus;
    const int line = take().line;
    expr = unary(kind, line, parse_unary(false));
  } else {
    expr = parse_primary(false);
  }
  expr = parse_postfix(expr);
  return with_filter ? parse_filters_and_tests(expr) : expr;
}

Expr* Parser::parse_name(bool with_namespace) {
  const Token name = take();
  Expr* expr = ast_->new_expr(ExprKind::kConstant, name.line);
  if (name.text == "true" || name.text == "True") {
    expr->constant = Value(true);
  } else if (name.text == "false" || name.text == "False") {
    expr->constant = Value(false);
  } else if (name.text != "none" && name.text != "None") {
    expr->kind = ExprKind::kName;
    expr->name = ast_->intern(name.text);
    if (with_namespace && skip_operator(".")) {
      expr->kind = ExprKind::kNamespaceTarget;
      expr->text = expect_any_name();
      return expr;
    }
    expr->text = name.text;
    for (MacroDef* macro : macros_around_) {
      macro->uses_caller |= name.text == "caller";
      macro->uses_kwargs |= name.text == "kwargs";
      macro->uses_varargs |= name.text == "varargs";
    }
  }
  return expr;
}

Expr* Parser::parse_primary(bool with_namespace) {
  const int line = token().line;
  switch (token().kind) {
    case TokenKind::kName:
      return parse_name(with_namespace);
    case TokenKind::kString: {
      auto* string = ast_->heap.make<String>();
      while (token().kind == TokenKind::kString) string->text += take().text;
      ast_->heap.charge(static_cast<int64_t>(string->text.size()));
      string->length =
          static_cast<int64_t>(std::count_if(string->text.begin(), string->text.end(), [](char c) {
            return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
          }));
      Expr* expr = ast_->new_expr(ExprKind::kConstant, line);
      expr->constant = Value(Kind::kString, string);
      return expr;
    }
    case TokenKind::kInteger:
    case TokenKind::kFloat: {
      Expr* expr = ast_->new_expr(ExprKind::kConstant, line);
      const bool integer = token().kind == TokenKind::kInteger;
      const Token number = take();
      expr->constant = integer ? Value(number.integer) : Value(number.real);
      return expr;
    }
    default:
      break;
  }
  if (skip_operator("(")) {
    TupleRule rule;
    rule.parentheses = true;
    Expr* inside = parse_tuple(rule);
    expect_operator(")");
    return inside;
  }
  if (skip_operator("[")) {
    Expr* list = ast_->new_expr(ExprKind::kList, line);
    while (!at_operator("]")) {
      if (!list->children.empty()) expect_operator(",");
      if (at_operator("]")) break;
      add_child(list, parse_expression());
    }
    expect_operator("]");
    return list;
  }
  if (skip_operator("{")) {
    Expr* dict = ast_->new_expr(ExprKind::kDict, line);
    while (!at_operator("}")) {
      if (!dict->children.empty()) expect_operator(",");
      if (at_operator("}")) break;
      add_child(dict, parse_expression());
      expect_operator(":");
      add_child(dict, parse_expression());
    }
    expect_operator("}");
    return dict;
  }
  fail_at(line, fmt::format("unexpected {}", describe()));
}

bool Parser::at_tuple_end(std::string_view end_name) const {
  return token().kind == TokenKind::kVariableEnd || token().kind == TokenKind::kBlockEnd ||
         at_operator(")") || (!end_name.empty() && at_name(end_name));
}

Expr* Parser::parse_tuple(const TupleRule& rule) {
  const int line = token().line;
  std::vector<Expr*> parts;
  bool is_tuple = false;
  while (true) {
    if (!parts.empty()) expect_operator(",");
    if (at_tuple_end(rule.end_name)) break;
    parts.push_back(rule.targets ? parse_primary(rule.with_namespace) : parse_expression(rule.with_if));
    if (!at_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!parts.empty()) return parts[0];
    if (!rule.parentheses) fail_at(line, fmt::format("expected an expression, got {}", describe()));
  }
  Expr* tuple = ast_->new_expr(ExprKind::kTuple, line);
  for (Expr* part : parts) add_child(tuple, part);
  return tuple;
}

Expr* Parser::parse_postfix(Expr* expr) {
  while (true) {
    if (at_operator(".") || at_operator("[")) {
      expr = parse_subscript(expr);
    } else if (at_operator("(")) {
      expr = parse_call(expr);
    } else {
      return expr;
    }
  }
}

Expr* Parser::parse_filters_and_tests(Expr* expr) {
  while (true) {
    if (at_operator("|")) {
      expr = parse_filter_chain(expr, false);
    } else if (at_name("is")) {
      expr = parse_test(expr);
    } else if (at_operator("(")) {
      expr = parse_call(expr);
    } else {
      return expr;
    }
  }
}

Expr* Parser::parse_subscript(Expr* object) {
  const Token opening = take();
  if (opening.text == ".") {
    if (token().kind == TokenKind::kName) {
      Expr* attribute = unary(ExprKind::kAttribute, opening.line, object);
      attribute->text = take().text;
      return attribute;
    }
    if (token().kind != TokenKind::kInteger) fail_at(token().line, "expected a name or a number after '.'");
    Expr* item = unary(ExprKind::kItem, opening.line, object);
    Expr* index = ast_->new_expr(ExprKind::kConstant, opening.line);
    index->constant = Value(take().integer);
    return add_child(item, index);
  }
  Expr* start = at_operator(":") ? nullptr : at_operator("]") ? nullptr : parse_expression();
  if (start == nullptr && at_operator("]")) fail_at(opening.line, "expected a subscript");
  if (!at_operator(":")) {
    if (at_operator(",")) fail_at(opening.line, "a subscript with ',' is not implemented");
    expect_operator("]");
    return add_child(unary(ExprKind::kItem, opening.line, object), start);
  }
  Expr* slice = add_child(unary(ExprKind::kSlice, opening.line, object), start);
  for (int part = 0; part < 2; ++part) {
    const bool given = skip_operator(":") && !at_operator(":") && !at_operator("]");
    add_child(slice, given ? parse_expression() : nullptr);
  }
  if (at_operator(",")) fail_at(opening.line, "a subscript with ',' is not implemented");
  expect_operator("]");
  return slice;
}

CallArguments Parser::parse_arguments() {
  const int line = token().line;
  expect_operator("(");
  CallArguments arguments;
  const auto require = [&](bool condition) {
    if (!condition) fail_at(line, "invalid syntax for a call");
  };
  bool first = true;
  while (!at_operator(")")) {
    if (!first) {
      expect_operator(",");
      if (at_operator(")")) break;
    }
    first = false;
    ast_->heap.charge(sizeof(std::string) + sizeof(void*));
    if (skip_operator("*")) {
      require(arguments.star == nullptr && arguments.star_star == nullptr);
      arguments.star = parse_expression();
    } else if (skip_operator("**")) {
      require(arguments.star_star == nullptr);
      arguments.star_star = parse_expression();
    } else if (token().kind == TokenKind::kName && peek().kind == TokenKind::kOperator &&
               peek().text == "=") {
      require(arguments.star_star == nullptr);
      std::string name = take().text;
      take();
      for (const auto& [earlier, value] : arguments.named) {
        if (earlier == name) fail_at(line, fmt::format("keyword argument '{}' is given twice", name));
      }
      arguments.named.emplace_back(std::move(name), parse_expression());
    } else {
      require(arguments.star == nullptr && arguments.star_star == nullptr && arguments.named.empty());
      arguments.positional.push_back(parse_expression());
    }
  }
  expect_operator(")");
  return arguments;
}

Expr* Parser::parse_call(Expr* callee) {
  Expr* call = unary(ExprKind::kCall, token().line, callee);
  call->arguments = parse_arguments();
  adopt_arguments(call);
  return call;
}

Expr* Parser::parse_filter_chain(Expr* input, bool first_without_pipe) {
  while (first_without_pipe || at_operator("|")) {
    if (!first_without_pipe) take();
    first_without_pipe = false;
    Expr* filter = unary(ExprKind::kFilter, token().line, input);
    filter->text = expect_any_name();
    while (skip_operator(".")) filter->text += "." + expect_any_name();
    filter->filter = find_filter(filter->text);
    if (filter->filter == nullptr) {
      unknown_.push_back({fmt::format("filter '{}' is not implemented", filter->text), filter->line});
    }
    if (at_operator("(")) filter->arguments = parse_arguments();
    adopt_arguments(filter);
    input = filter;
  }
  return input;
}

Expr* Parser::parse_test(Expr* value) {
  const int line = take().line;
  const bool negated = skip_name("not");
  Expr* test = unary(ExprKind::kTest, line, value);
  test->text = expect_any_name();
  while (skip_operator(".")) test->text += "." + expect_any_name();
  test->test = find_test(test->text);
  if (test->test == nullptr) {
    unknown_.push_back({fmt::format("test '{}' is not implemented", test->text), line});
  }
  const TokenKind next = token().kind;
  if (at_operator("(")) {
    test->arguments = parse_arguments();
  } else if (next == TokenKind::kString || next == TokenKind::kInteger || next == TokenKind::kFloat ||
             at_operator("[") || at_operator("{") ||
             (next == TokenKind::kName && !at_name("else") && !at_name("or") && !at_name("and"))) {
    if (at_name("is")) fail_at(line, "tests cannot be chained with 'is'");
    test->arguments.positional.push_back(parse_postfix(parse_primary(false)));
  }
  adopt_arguments(test);
  return negated ? unary(ExprKind::kNot, line, test) : test;
}

}  // namespace nibble::jinja
