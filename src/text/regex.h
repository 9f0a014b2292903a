// A compiled pattern of tokenizer.json, run with bounds: no pattern and no text can make it hang.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace nibble {

// Bytes [begin, end) of a text.
struct TextRange {
  size_t begin, end;
};

// Working memory of one encode call, and the time that its matching may take: a clock, since a hostile
// pattern can keep below any count of steps per match and yet need that at every byte.
class RegexScratch {
 public:
  explicit RegexScratch(size_t text_bytes);
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  pcre2_real_match_data_8* match_data_;
  pcre2_real_match_context_8* context_;
  pcre2_real_jit_stack_8* jit_stack_;
  std::chrono::steady_clock::time_point deadline_;
};

// Immutable after compiling; safe for concurrent use with one scratch per thread.
class Regex {
 public:
  // A pattern in Oniguruma's dialect (pattern.h). REQUIRES valid UTF-8.
  static Result<Regex> compile(std::string_view pattern);
  // A pattern that matches `text` itself. REQUIRES valid UTF-8.
  static Result<Regex> compile_literal(std::string_view text);

  // All matches in `text`, from left to right, none in another; an empty match right after another match is
  // skipped. REQUIRES `text` is valid UTF-8 that went through older_look_alike.
  Status find_all(std::string_view text, RegexScratch& scratch, std::vector<TextRange>& matches) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  explicit Regex(pcre2_real_code_8* code) : code_(code) {}
  static Result<Regex> compile_translated(const std::string& pattern);
  // Finds the first match that starts at `start` or later.
  Result<bool> find(std::string_view text, size_t start, RegexScratch& scratch, TextRange& match) const;

  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace nibble
