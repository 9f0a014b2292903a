// The syntax tree. Nodes belong to their Ast (a flat list, so that no destructor recurses) and point at one
// another; names are small numbers.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/jinja_value.h"

namespace nibble::jinja {

using NameId = int;

enum class ExprKind : uint8_t {
  kConstant,
  kName,
  kList,
  kTuple,
  kDict,  // children: key, value, key, value, ...
  kNot,
  kNegate,
  kPlus,
  kBinary,  // op
  kConcat,
  kAnd,
  kOr,
  kCompare,          // children[0], then comparisons[i] with children[i + 1]
  kIf,               // children: condition, then, else (may be null)
  kAttribute,        // children[0].text
  kItem,             // children[0][children[1]]
  kSlice,            // children[0][children[1] : children[2] : children[3]], each may be null
  kCall,             // children[0](arguments)
  kFilter,           // children[0] (null inside a filter block) | text(arguments)
  kTest,             // children[0] is text(arguments)
  kNamespaceTarget,  // name.text, only as a target
};

enum class Comparison : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kIn, kNotIn };

struct Expr;

struct CallArguments {
  std::vector<Expr*> positional;
  std::vector<std::pair<std::string, Expr*>> named;
  Expr* star = nullptr;       // *args
  Expr* star_star = nullptr;  // **kwargs
};

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  int line = 0;
  int depth = 1;
  Operator op = Operator::kAdd;
  NameId name = 0;
  std::string text;
  Value constant;
  std::vector<Expr*> children;
  std::vector<Comparison> comparisons;
  CallArguments arguments;
  Filter filter = nullptr;
  Test test = nullptr;
};

enum class StmtKind : uint8_t {
  kText,
  kOutput,    // {{ value }}
  kFor,       // target in value if condition: body, otherwise
  kIf,        // condition: body, otherwise; an elif is an If alone in `otherwise`
  kSet,       // target = value
  kSetBlock,  // target = body, through the filters of `value` where it is not null
  kMacro,
  kCallBlock,    // value is the call; the body is a macro named caller
  kFilterBlock,  // body through the filters of `value`
  kScope,        // {% with %} (targets, values) and {% generation %}
  kBreak,
  kContinue,
};

struct Stmt;
using Block = std::vector<Stmt*>;

struct MacroDef {
  NameId name = 0;
  std::string name_text;
  std::vector<NameId> parameters;
  std::vector<std::string> parameter_texts;
  std::vector<Expr*> defaults;  // of the last parameters
  bool uses_caller = false, uses_kwargs = false, uses_varargs = false;
};

struct Stmt {
  StmtKind kind = StmtKind::kText;
  int line = 0;
  int depth = 1;
  std::string text;
  Expr* target = nullptr;
  Expr* value = nullptr;
  Expr* condition = nullptr;
  Block body, otherwise;
  MacroDef macro;
  std::vector<Expr*> targets, values;
};

class Ast {
 public:
  explicit Ast(int64_t max_bytes) : heap(max_bytes) {}

  Heap heap;  // of the constants
  Block body;

  Expr* new_expr(ExprKind kind, int line) {
    heap.charge(sizeof(Expr));
    Expr& expr = exprs_.emplace_back();
    expr.kind = kind;
    expr.line = line;
    return &expr;
  }
  Stmt* new_stmt(StmtKind kind, int line) {
    heap.charge(sizeof(Stmt));
    Stmt& stmt = stmts_.emplace_back();
    stmt.kind = kind;
    stmt.line = line;
    return &stmt;
  }
  NameId intern(const std::string& name) {
    const auto [found, is_new] = ids_.try_emplace(name, static_cast<NameId>(names_.size()));
    if (is_new) names_.push_back(name);
    return found->second;
  }
  const std::string& name(NameId id) const { return names_[static_cast<size_t>(id)]; }
  // -1 where the template does not mention the name.
  NameId find(const std::string& name) const {
    const auto found = ids_.find(name);
    return found == ids_.end() ? -1 : found->second;
  }

 private:
  std::deque<Expr> exprs_;
  std::deque<Stmt> stmts_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, NameId> ids_;
};

}  // namespace nibble::jinja
