// Walks the tree: one Renderer is one rendering.
#pragma once

#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja_ast.h"

namespace nibble::jinja {

class Renderer {
 public:
  Renderer(const Ast& ast, const TemplateLimits& limits, const std::tm* now)
      : ast_(ast), runtime_(limits, now) {}

  // Throws Error.
  std::string render(const nlohmann::ordered_json& context);
  // Of what is being evaluated; for messages.
  int line() const { return runtime_.line; }

 private:
  // Names are looked up from the innermost scope outwards, then in the context, then among the globals. The
  // body of a for, a macro, a block set and the like have a scope of their own; an if has not.
  struct Scope {
    Scope* parent = nullptr;
    std::vector<std::pair<NameId, Value>> values;
  };
  enum class Flow { kOn, kBreak, kContinue };

  // ---- jinja_render.cc
  Value from_json(const nlohmann::ordered_json& json);
  Scope* new_scope(Scope* parent);
  void set(Scope& scope, NameId name, const Value& value);
  Value lookup(const Scope& scope, NameId name, const std::string& text);
  void assign(Scope& scope, const Expr& target, const Value& value);
  void write(std::string& out, const Value& value);
  void write(std::string& out, std::string_view text);
  Flow run(const Block& block, Scope& scope, std::string& out);
  Flow run(const Stmt& stmt, Scope& scope, std::string& out);
  Flow run_if(const Stmt& stmt, Scope& scope, std::string& out);
  Flow run_for(const Stmt& stmt, Scope& scope, std::string& out);
  Flow run_captured(const Stmt& stmt, Scope& scope, std::string& out);
  Flow run_scope(const Stmt& stmt, Scope& scope, std::string& out);
  void run_call_block(const Stmt& stmt, Scope& scope, std::string& out);
  Value make_macro(const Stmt& stmt, Scope& scope);
  void bind_macro(const MacroDef& macro, Scope& scope, Args& args);

  // ---- jinja_eval.cc
  Value eval(const Expr& expr, Scope& scope);
  Value eval_node(const Expr& expr, Scope& scope);
  Value eval_dict(const Expr& expr, Scope& scope);
  Value eval_compare(const Expr& expr, Scope& scope);
  Value eval_call(const Expr& expr, Scope& scope, const Value* caller);
  // `block` is what the innermost filter of a filter block or block set gets.
  Value eval_filter(const Expr& expr, Scope& scope, const Value* block);
  Args eval_arguments(const CallArguments& arguments, Scope& scope);
  std::vector<Value> eval_all(const std::vector<Expr*>& exprs, Scope& scope);

  const Ast& ast_;
  Runtime runtime_;
  std::deque<Scope> scopes_;
  std::vector<std::optional<Value>> context_;  // by NameId
};

}  // namespace nibble::jinja
