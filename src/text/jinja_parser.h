// Tokens -> Ast. Grammar and precedences are Jinja's; what is not implemented is refused by name and line.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja_ast.h"
#include "text/jinja_lexer.h"

namespace nibble::jinja {

// Throws Error.
std::unique_ptr<Ast> parse_template(const std::string& source, const TemplateLimits& limits);

class Parser {
 public:
  Parser(std::vector<Token> tokens, const TemplateLimits& limits)
      : tokens_(std::move(tokens)), limits_(limits), ast_(std::make_unique<Ast>(limits.max_memory_bytes)) {}
  std::unique_ptr<Ast> run();

 private:
  // ---- tokens
  const Token& token() const { return tokens_[position_]; }
  const Token& peek() const { return tokens_[position_ + 1 < tokens_.size() ? position_ + 1 : position_]; }
  Token take() { return tokens_[position_ + 1 < tokens_.size() ? position_++ : position_]; }
  bool at_operator(std::string_view spelling) const {
    return token().kind == TokenKind::kOperator && token().text == spelling;
  }
  bool at_name(std::string_view name) const {
    return token().kind == TokenKind::kName && token().text == name;
  }
  bool skip_operator(std::string_view spelling);
  bool skip_name(std::string_view name);
  void expect_operator(std::string_view spelling);
  void expect_name(std::string_view name);
  std::string expect_any_name();
  void expect_kind(TokenKind kind);
  std::string describe() const;
  [[noreturn]] void fail_at(int line, std::string message) const { throw Error{std::move(message), line}; }

  // ---- depth: of the recursion here and of the tree (a long a.b.c is a deep tree without recursion)
  struct Nest {
    explicit Nest(Parser& parser) : parser(parser) {
      if (++parser.nest_ > parser.limits_.max_depth) parser.fail_depth();
    }
    ~Nest() { --parser.nest_; }
    Nest(const Nest&) = delete;
    Nest& operator=(const Nest&) = delete;
    Parser& parser;
  };
  [[noreturn]] void fail_depth() const;
  void adopt(int& depth, int child_depth) const;
  Expr* add_child(Expr* parent, Expr* child) const;
  Expr* unary(ExprKind kind, int line, Expr* child);
  void adopt_arguments(Expr* expr) const;

  // ---- expressions (jinja_parser.cc)
  Expr* parse_expression(bool with_if = true);
  Expr* parse_if_expression();
  Expr* parse_or();
  Expr* parse_and();
  Expr* parse_not();
  Expr* parse_compare();
  Expr* parse_sum();
  Expr* parse_concat();
  Expr* parse_product();
  Expr* parse_power();
  Expr* parse_unary(bool with_filter);
  Expr* parse_primary(bool with_namespace);
  Expr* parse_name(bool with_namespace);
  Expr* parse_postfix(Expr* expr);
  Expr* parse_filters_and_tests(Expr* expr);
  Expr* parse_subscript(Expr* object);
  Expr* parse_call(Expr* callee);
  Expr* parse_filter_chain(Expr* input, bool first_without_pipe);
  Expr* parse_test(Expr* value);
  CallArguments parse_arguments();
  struct TupleRule {
    bool targets = false;  // names only, as in `for a, b in`
    bool with_if = true;
    std::string_view end_name = "";  // besides the usual ends
    bool parentheses = false;
    bool with_namespace = false;
  };
  Expr* parse_tuple(const TupleRule& rule);
  bool at_tuple_end(std::string_view end_name) const;
  Expr* binary_chain(Expr* (Parser::*operand)(), std::string_view spellings);

  // ---- statements (jinja_parser_statements.cc)
  Block parse_block(const std::vector<std::string_view>& ends);  // stops at the name of the end tag
  Block parse_body(const std::vector<std::string_view>& ends);   // the same, from the end of the opening tag
  void parse_statement(Block& out);
  Stmt* parse_for();
  Stmt* parse_if();
  Stmt* parse_set();
  Stmt* parse_macro();
  Stmt* parse_call_block();
  Stmt* parse_filter_block();
  Stmt* parse_with();
  Stmt* parse_generation();
  void parse_print(Block& out);
  void parse_signature(MacroDef& macro);
  void parse_macro_body(Stmt* stmt, std::string_view end);
  Expr* parse_target(bool with_namespace, std::string_view end_name);
  std::string parse_target_name();
  void check_target(const Expr* target) const;
  void finish(Stmt* stmt) const;

  // Jinja refuses an unknown filter or test when it compiles, except below an if, where it is refused when
  // it runs. These are the unknown ones so far; an if drops those that came since it began.
  std::vector<Error> unknown_;
  void refuse_unknown(size_t since) const;

  std::vector<Token> tokens_;
  size_t position_ = 0;
  const TemplateLimits& limits_;
  std::unique_ptr<Ast> ast_;
  int nest_ = 0;
  int loops_ = 0;         // that `break` could leave
  int loops_around_ = 0;  // the same, not forgotten inside a macro: there `loop` may not be assigned
  std::vector<MacroDef*> macros_around_;
};

}  // namespace nibble::jinja
