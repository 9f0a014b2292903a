// Statements: what stands in {% %}.
#include <algorithm>

#include "text/jinja_parser.h"

namespace nibble::jinja {
namespace {

constexpr std::string_view kReserved[] = {"true", "false", "none", "True", "False", "None"};

}  // namespace

std::unique_ptr<Ast> parse_template(const std::string& source, const TemplateLimits& limits) {
  return Parser(tokenize(source), limits).run();
}

std::unique_ptr<Ast> Parser::run() {
  ast_->body = parse_block({});
  refuse_unknown(0);
  return std::move(ast_);
}

void Parser::refuse_unknown(size_t since) const {
  if (unknown_.size() > since) throw unknown_[since];
}

void Parser::finish(Stmt* stmt) const {
  const auto expr = [&](const Expr* child) {
    if (child != nullptr) adopt(stmt->depth, child->depth);
  };
  expr(stmt->target);
  expr(stmt->value);
  expr(stmt->condition);
  for (const Expr* child : stmt->values) expr(child);
  for (const Expr* child : stmt->macro.defaults) expr(child);
  for (const Stmt* child : stmt->body) adopt(stmt->depth, child->depth);
  for (const Stmt* child : stmt->otherwise) adopt(stmt->depth, child->depth);
}

Block Parser::parse_block(const std::vector<std::string_view>& ends) {
  const Nest nest(*this);
  Block block;
  while (token().kind != TokenKind::kEnd) {
    const int line = token().line;
    if (token().kind == TokenKind::kData) {
      Stmt* text = ast_->new_stmt(StmtKind::kText, line);
      text->text = take().text;
      block.push_back(text);
    } else if (token().kind == TokenKind::kVariableBegin) {
      take();
      Stmt* output = ast_->new_stmt(StmtKind::kOutput, line);
      output->value = parse_tuple({});
      expect_kind(TokenKind::kVariableEnd);
      finish(output);
      block.push_back(output);
    } else {
      take();  // {%
      for (const std::string_view end : ends) {
        if (at_name(end)) return block;
      }
      parse_statement(block);
      expect_kind(TokenKind::kBlockEnd);
    }
  }
  if (!ends.empty())
    fail_at(token().line, fmt::format("unexpected end of template, expected '{}'", ends.back()));
  return block;
}

Block Parser::parse_body(const std::vector<std::string_view>& ends) {
  skip_operator(":");
  expect_kind(TokenKind::kBlockEnd);
  return parse_block(ends);
}

void Parser::parse_statement(Block& out) {
  const int line = token().line;
  if (token().kind != TokenKind::kName) fail_at(line, "expected the name of a tag");
  const std::string& name = token().text;
  Stmt* stmt = nullptr;
  if (name == "print") return parse_print(out);
  if (name == "for") {
    stmt = parse_for();
  } else if (name == "if") {
    stmt = parse_if();
  } else if (name == "set") {
    stmt = parse_set();
  } else if (name == "macro") {
    stmt = parse_macro();
  } else if (name == "call") {
    stmt = parse_call_block();
  } else if (name == "filter") {
    stmt = parse_filter_block();
  } else if (name == "with") {
    stmt = parse_with();
  } else if (name == "generation") {
    stmt = parse_generation();
  } else if (name == "break" || name == "continue") {
    if (loops_ == 0) fail_at(line, fmt::format("'{}' outside of a loop", name));
    stmt = ast_->new_stmt(name == "break" ? StmtKind::kBreak : StmtKind::kContinue, line);
    take();
  } else if (name.starts_with("end") || name == "else" || name == "elif") {
    fail_at(line, fmt::format("unexpected tag '{}'", name));
  } else {
    fail_at(line, fmt::format("tag '{}' is not implemented", name));
  }
  finish(stmt);
  out.push_back(stmt);
}

void Parser::parse_print(Block& out) {
  const int line = take().line;
  bool first = true;
  while (token().kind != TokenKind::kBlockEnd) {
    if (!first) expect_operator(",");
    first = false;
    Stmt* output = ast_->new_stmt(StmtKind::kOutput, line);
    output->value = parse_expression();
    finish(output);
    out.push_back(output);
  }
}

// ---- targets

void Parser::check_target(const Expr* target) const {
  if (target->kind == ExprKind::kTuple) {
    for (const Expr* part : target->children) check_target(part);
    return;
  }
  if (target->kind != ExprKind::kName && target->kind != ExprKind::kNamespaceTarget) {
    fail_at(target->line, "cannot assign to this expression");
  }
  if (target->kind == ExprKind::kName && target->text == "loop" && loops_around_ > 0) {
    fail_at(target->line, "cannot assign to the special variable 'loop' inside a for");
  }
}

Expr* Parser::parse_target(bool with_namespace, std::string_view end_name) {
  TupleRule rule;
  rule.targets = true;
  rule.end_name = end_name;
  rule.with_namespace = with_namespace;
  Expr* target = parse_tuple(rule);
  check_target(target);
  return target;
}

std::string Parser::parse_target_name() {
  const int line = token().line;
  std::string name = expect_any_name();
  if (std::find(std::begin(kReserved), std::end(kReserved), name) != std::end(kReserved)) {
    fail_at(line, fmt::format("cannot assign to '{}'", name));
  }
  return name;
}

// ---- tags

Stmt* Parser::parse_for() {
  Stmt* stmt = ast_->new_stmt(StmtKind::kFor, take().line);
  ++loops_around_;
  stmt->target = parse_target(false, "in");
  expect_name("in");
  TupleRule rule;
  rule.with_if = false;
  rule.end_name = "recursive";
  stmt->value = parse_tuple(rule);
  const size_t unknown_before = unknown_.size();
  if (skip_name("if")) stmt->condition = parse_expression();
  if (at_name("recursive")) fail_at(token().line, "a recursive for is not implemented");
  ++loops_;
  stmt->body = parse_body({"endfor", "else"});
  --loops_;
  if (take().text == "else") {
    stmt->otherwise = parse_body({"endfor"});
    take();
  }
  refuse_unknown(unknown_before);
  --loops_around_;
  return stmt;
}

Stmt* Parser::parse_if() {
  const size_t unknown_before = unknown_.size();
  Stmt* first = ast_->new_stmt(StmtKind::kIf, take().line);
  std::vector<Stmt*> chain = {first};
  while (true) {
    TupleRule rule;
    rule.with_if = false;
    Stmt* stmt = chain.back();
    stmt->condition = parse_tuple(rule);
    stmt->body = parse_body({"elif", "else", "endif"});
    const Token tag = take();
    if (tag.text == "elif") {
      chain.push_back(ast_->new_stmt(StmtKind::kIf, tag.line));
      continue;
    }
    if (tag.text == "else") {
      stmt->otherwise = parse_body({"endif"});
      take();
    }
    break;
  }
  for (size_t i = chain.size() - 1; i > 0; --i) {
    finish(chain[i]);
    // A long chain of elifs is not deep: the renderer walks along it.
    chain[i - 1]->otherwise = {chain[i]};
    chain[i]->depth = 1;
    for (const Stmt* child : chain[i]->body) chain[i]->depth = std::max(chain[i]->depth, child->depth);
  }
  unknown_.resize(unknown_before);
  return first;
}

Stmt* Parser::parse_set() {
  Stmt* stmt = ast_->new_stmt(StmtKind::kSet, take().line);
  stmt->target = parse_target(true, "");
  if (skip_operator("=")) {
    stmt->value = parse_tuple({});
    return stmt;
  }
  stmt->kind = StmtKind::kSetBlock;
  const size_t unknown_before = unknown_.size();
  stmt->value = parse_filter_chain(nullptr, false);
  stmt->body = parse_body({"endset"});
  take();
  refuse_unknown(unknown_before);
  return stmt;
}

void Parser::parse_signature(MacroDef& macro) {
  expect_operator("(");
  while (!at_operator(")")) {
    if (!macro.parameters.empty()) expect_operator(",");
    const std::string name = parse_target_name();
    if (std::find(macro.parameter_texts.begin(), macro.parameter_texts.end(), name) !=
        macro.parameter_texts.end()) {
      fail_at(token().line, fmt::format("parameter '{}' is given twice", name));
    }
    macro.parameters.push_back(ast_->intern(name));
    macro.parameter_texts.push_back(name);
    if (skip_operator("=")) {
      macro.defaults.push_back(parse_expression());
    } else if (!macro.defaults.empty()) {
      fail_at(token().line, "a parameter without a default follows one with a default");
    }
  }
  expect_operator(")");
}

void Parser::parse_macro_body(Stmt* stmt, std::string_view end) {
  const size_t unknown_before = unknown_.size();
  const int loops_outside = std::exchange(loops_, 0);
  macros_around_.push_back(&stmt->macro);
  stmt->body = parse_body({end});
  macros_around_.pop_back();
  take();
  loops_ = loops_outside;
  refuse_unknown(unknown_before);
  MacroDef& macro = stmt->macro;
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const std::string& name = macro.parameter_texts[i];
    macro.uses_kwargs &= name != "kwargs";
    macro.uses_varargs &= name != "varargs";
    if (name != "caller" || !macro.uses_caller) continue;
    if (i + macro.defaults.size() < macro.parameters.size()) {
      fail_at(stmt->line, "the parameter 'caller' must be omitted or be given a default");
    }
    macro.uses_caller = false;  // an ordinary parameter
  }
}

Stmt* Parser::parse_macro() {
  Stmt* stmt = ast_->new_stmt(StmtKind::kMacro, take().line);
  stmt->macro.name_text = parse_target_name();
  stmt->macro.name = ast_->intern(stmt->macro.name_text);
  parse_signature(stmt->macro);
  parse_macro_body(stmt, "endmacro");
  return stmt;
}

Stmt* Parser::parse_call_block() {
  Stmt* stmt = ast_->new_stmt(StmtKind::kCallBlock, take().line);
  stmt->macro.name_text = "caller";
  if (at_operator("(")) parse_signature(stmt->macro);
  stmt->value = parse_expression();
  if (stmt->value->kind != ExprKind::kCall) fail_at(stmt->line, "expected a call");
  parse_macro_body(stmt, "endcall");
  return stmt;
}

Stmt* Parser::parse_filter_block() {
  Stmt* stmt = ast_->new_stmt(StmtKind::kFilterBlock, take().line);
  const size_t unknown_before = unknown_.size();
  stmt->value = parse_filter_chain(nullptr, true);
  stmt->body = parse_body({"endfilter"});
  take();
  refuse_unknown(unknown_before);
  return stmt;
}

Stmt* Parser::parse_with() {
  Stmt* stmt = ast_->new_stmt(StmtKind::kScope, take().line);
  while (token().kind != TokenKind::kBlockEnd) {
    if (!stmt->targets.empty()) expect_operator(",");
    stmt->targets.push_back(parse_target(false, ""));
    expect_operator("=");
    stmt->values.push_back(parse_expression());
  }
  const size_t unknown_before = unknown_.size();
  stmt->body = parse_body({"endwith"});
  take();
  refuse_unknown(unknown_before);
  return stmt;
}

Stmt* Parser::parse_generation() {
  Stmt* stmt = ast_->new_stmt(StmtKind::kScope, take().line);
  const size_t unknown_before = unknown_.size();
  const int loops_outside = std::exchange(loops_, 0);  // its body is a macro in transformers
  stmt->body = parse_body({"endgeneration"});
  take();
  loops_ = loops_outside;
  refuse_unknown(unknown_before);
  return stmt;
}

}  // namespace nibble::jinja
