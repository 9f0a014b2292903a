#include "text/pattern.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "text/json_fields.h"
#include "text/pattern_escape.h"
#include "text/utf8.h"

namespace nibble {
namespace {

constexpr int kMaxNesting = 50;  // of groups, and of classes

class Translator {
 public:
  explicit Translator(std::string_view pattern) : rest_(pattern) {}

  Result<std::string> translate() {
    while (!rest_.empty()) NIBBLE_RETURN_IF_ERROR(translate_next());
    if (!groups_.empty()) return user_error("a group is not closed");
    return std::move(out_);
  }

 private:
  struct Group {
    size_t start;       // in out_
    bool ignored_case;  // outside of the group
  };

  bool take(std::string_view prefix) {
    if (!rest_.starts_with(prefix)) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }

  Status refused(std::string_view construct) const {
    return user_error("the construct {} is not implemented", in_quotes(construct));
  }

  Status translate_next() {
    char c = rest_[0];
    switch (c) {
      case '(':
        return open_group();
      case ')':
        return close_group();
      case '|':
        rest_.remove_prefix(1);
        out_ += '|';
        atom_.reset();
        return {};
      case '^':
      case '$':
        rest_.remove_prefix(1);
        out_ += c;
        atom_.reset();
        return {};
      case '*':
      case '+':
      case '?':
        rest_.remove_prefix(1);
        NIBBLE_RETURN_IF_ERROR(quantify(std::string(1, c)));
        take_quantifier_suffix();
        return {};
      case '{':
        return translate_brace();
      default:
        break;
    }
    atom_ = out_.size();
    fresh_ = true;
    if (take(".")) {
      out_ += "[^\\n]";
      return {};
    }
    if (c == '[') {
      NIBBLE_ASSIGN_OR_RETURN(std::string expression, translate_class(rest_, ignore_case_, 0));
      out_ += expression;
      return {};
    }
    if (c == '\\') {
      NIBBLE_ASSIGN_OR_RETURN(Escape escape, read_escape(rest_));
      if (escape.kind == Escape::Kind::kCharacter) append_literal(escape.character, out_);
      if (escape.kind == Escape::Kind::kSet) out_ += "[" + escape.text + "]";
      if (escape.kind == Escape::Kind::kNotSet) out_ += "[^" + escape.text + "]";
      if (escape.kind == Escape::Kind::kExpression) out_ += escape.text;
      if (escape.kind == Escape::Kind::kAssertion) {
        out_ += escape.text;
        atom_.reset();
      }
      return {};
    }
    Utf8Character character = first_character(rest_);
    rest_.remove_prefix(character.size_bytes);
    append_literal(character.code, out_);
    return {};
  }

  Status open_group() {
    if (groups_.size() == kMaxNesting) return user_error("groups are nested more than {} deep", kMaxNesting);
    size_t start = out_.size();
    for (std::string_view option : {"(?i)", "(?-i)"}) {
      if (!rest_.starts_with(option)) continue;
      // Elsewhere Oniguruma takes the alternatives that follow into the option's scope, and PCRE2 does not.
      if (start != (groups_.empty() ? 0 : body_start_)) return refused(option);
      rest_.remove_prefix(option.size());
      out_ += option;
      body_start_ = out_.size();
      ignore_case_ = option == "(?i)";
      return {};
    }
    Group group{start, ignore_case_};
    bool opened = false;
    for (std::string_view opener : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:"}) {
      if (!take(opener)) continue;
      out_ += opener;
      if (opener == "(?i:") ignore_case_ = true;
      if (opener == "(?-i:") ignore_case_ = false;
      opened = true;
      break;
    }
    if (!opened) {
      if (rest_.starts_with("(?") || rest_.starts_with("(*"))
        return refused(rest_.substr(0, std::min<size_t>(rest_.size(), 4)));
      rest_.remove_prefix(1);
      out_ += "(?:";  // nothing can refer to what a group captured
    }
    groups_.push_back(group);
    atom_.reset();
    body_start_ = out_.size();
    return {};
  }

  Status close_group() {
    if (groups_.empty()) return user_error("a ) closes no group");
    rest_.remove_prefix(1);
    out_ += ')';
    atom_ = groups_.back().start;
    fresh_ = true;
    ignore_case_ = groups_.back().ignored_case;
    groups_.pop_back();
    return {};
  }

  // `{n,m}` as a quantifier, or a brace that stands for itself.
  Status translate_brace() {
    std::string_view rest = rest_.substr(1);
    auto number = [&] {
      size_t digits = 0;
      while (digits < rest.size() && rest[digits] >= '0' && rest[digits] <= '9') ++digits;
      std::string text(rest.substr(0, digits));
      rest.remove_prefix(digits);
      return text;
    };
    std::string low = number();
    bool comma = rest.starts_with(",");
    if (comma) rest.remove_prefix(1);
    std::string high = comma ? number() : "";
    if (!rest.starts_with("}") || (low.empty() && high.empty())) {
      atom_ = out_.size();
      fresh_ = true;
      rest_.remove_prefix(1);
      out_ += "\\{";
      return {};
    }
    rest_ = rest.substr(1);
    if (std::max(low.size(), high.size()) > 4) return user_error("a repeat count is more than 9999");
    if (!low.empty() && !high.empty() && std::stoi(low) > std::stoi(high))
      return user_error("a repeat count from {} to {}", low, high);
    if (low.empty()) low.push_back('0');
    NIBBLE_RETURN_IF_ERROR(quantify(fmt::format("{{{}{}{}}}", low, comma ? "," : "", high)));
    // A `?` makes it lazy, but {n}? is an optional {n}. A `+` repeats it. Both that way are the next
    // quantifier.
    if (comma && take("?")) out_ += '?';
    return {};
  }

  // One quantifier on the last atom. On an atom that has one already it goes around both.
  Status quantify(const std::string& quantifier) {
    if (!atom_.has_value())
      return user_error("the quantifier {} follows nothing that can be repeated", quantifier);
    if (!fresh_) {
      out_.insert(*atom_, "(?:");
      out_ += ')';
    }
    out_ += quantifier;
    fresh_ = false;
    return {};
  }

  void take_quantifier_suffix() {
    if (take("?")) {
      out_ += '?';
    } else if (take("+")) {
      out_ += '+';
    }
  }

  std::string_view rest_;
  std::string out_;
  std::vector<Group> groups_;
  std::optional<size_t> atom_;  // where in out_ the last repeatable thing starts
  bool fresh_ = false;          // it has no quantifier yet
  bool ignore_case_ = false;
  size_t body_start_ = 0;  // where in out_ the innermost open group's body starts, while nothing is in it
};

}  // namespace

Result<std::string> translate_pattern(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes)
    return user_error("{} bytes, more than the {} that a pattern may have", pattern.size(), kMaxPatternBytes);
  return Translator(pattern).translate();
}

std::string literal_pattern(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    Utf8Character character = first_character(text);
    append_literal(character.code, out);
    text.remove_prefix(character.size_bytes);
  }
  return out;
}

}  // namespace nibble
