// Status and Result<T>: what can go wrong with files and users, as values. No exception crosses a border
// between folders of src/. A message is one line that names the thing, what was wanted, what is there, and
// where it helps what to do.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/one_line.h"

namespace nibble {

enum class ErrorCode {
  kOk = 0,
  kUser = 1,      // a file, flag, model or request is at fault; process exit code 1
  kInternal = 2,  // nibble or the machine is at fault; process exit code 2
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  // The message becomes one line, also where it quotes a file or a template.
  Status(ErrorCode code, std::string message) : code_(code), message_(one_line(std::move(message))) {
    NIBBLE_CHECK(code != ErrorCode::kOk);
  }

  bool ok() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // The same error with `context: ` put in front of the message; ok stays ok.
  Status with_context(const std::string& context) const {
    return ok() ? *this : Status(code_, context + ": " + message_);
  }

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

// user_error("tensor '{}': wanted {}, found {}", ...)
template <class... Args>
Status user_error(fmt::format_string<Args...> format, Args&&... args) {
  return Status(ErrorCode::kUser, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
Status internal_error(fmt::format_string<Args...> format, Args&&... args) {
  return Status(ErrorCode::kInternal, fmt::format(format, std::forward<Args>(args)...));
}

// A T or the Status that says why there is none. value() REQUIRES ok().
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {  // NOLINT: implicit by design
    NIBBLE_CHECK(!status_.ok());
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    NIBBLE_CHECK(ok());
    return *value_;
  }
  const T& value() const& {
    NIBBLE_CHECK(ok());
    return *value_;
  }
  // By value, so that a loop over a temporary's value does not outlive it.
  T value() && {
    NIBBLE_CHECK(ok());
    return std::move(*value_);
  }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(*this).value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace nibble

// RETURN_IF_ERROR(status_expression);
#define NIBBLE_RETURN_IF_ERROR(expression)                                      \
  do {                                                                          \
    if (::nibble::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

// ASSIGN_OR_RETURN(auto x, result_expression);
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in parentheses
#define NIBBLE_CONCAT_INNER(a, b) a##b
#define NIBBLE_CONCAT(a, b) NIBBLE_CONCAT_INNER(a, b)
#define NIBBLE_ASSIGN_OR_RETURN(declaration, expression) \
  NIBBLE_ASSIGN_OR_RETURN_IMPL(NIBBLE_CONCAT(result_, __LINE__), declaration, expression)
#define NIBBLE_ASSIGN_OR_RETURN_IMPL(result, declaration, expression) \
  auto result = (expression);                                         \
  if (!result.ok()) return result.status();                           \
  declaration = std::move(result).value()
// NOLINTEND(bugprone-macro-parentheses)
