#include "text/regex.h"

#include <algorithm>

#include "text/pattern.h"
#include "text/utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace nibble {
namespace {

// Steps of backtracking from one start. A run of a million spaces needs some millions in the patterns of
// well-known models.
constexpr uint32_t kMaxSteps = 20'000'000;
constexpr uint32_t kMaxHeapKib = 64 * 1024;
constexpr size_t kJitStackStartBytes = 32 * 1024;
constexpr size_t kJitStackMostBytes = 16 * 1024 * 1024;
// Starts that are tried between two looks at the clock.
constexpr size_t kWindowBytes = 256;

std::string message_of(int error) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

RegexScratch::RegexScratch(size_t text_bytes)
    : match_data_(pcre2_match_data_create(1, nullptr)),
      context_(pcre2_match_context_create(nullptr)),
      jit_stack_(pcre2_jit_stack_create(kJitStackStartBytes, kJitStackMostBytes, nullptr)),
      deadline_(std::chrono::steady_clock::now() +
                std::chrono::seconds(10 + static_cast<int64_t>(text_bytes >> 20))) {
  NIBBLE_CHECK(match_data_ != nullptr && context_ != nullptr);
  pcre2_set_match_limit(context_, kMaxSteps);
  pcre2_set_heap_limit(context_, kMaxHeapKib);
  if (jit_stack_ != nullptr) pcre2_jit_stack_assign(context_, nullptr, jit_stack_);
}

RegexScratch::~RegexScratch() {
  pcre2_match_data_free(match_data_);
  pcre2_match_context_free(context_);
  pcre2_jit_stack_free(jit_stack_);
}

void Regex::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

Result<Regex> Regex::compile(std::string_view pattern) {
  NIBBLE_ASSIGN_OR_RETURN(std::string translated, translate_pattern(pattern));
  return compile_translated(translated);
}

Result<Regex> Regex::compile_literal(std::string_view text) {
  return compile_translated(literal_pattern(text));
}

Result<Regex> Regex::compile_translated(const std::string& pattern) {
  std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  NIBBLE_CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_bsr(context.get(), PCRE2_BSR_UNICODE);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_USE_OFFSET_LIMIT, &error,
                                   &offset, context.get());
  if (code == nullptr) return user_error("the regular expression does not compile: {}", message_of(error));
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it cannot, pcre2_match interprets
  return Regex(code);
}

Result<bool> Regex::find(std::string_view text, size_t start, RegexScratch& scratch, TextRange& match) const {
  for (;;) {
    size_t next = std::min(start + kWindowBytes, text.size());
    while (next < text.size() && (static_cast<unsigned char>(text[next]) & 0xC0) == 0x80) ++next;
    pcre2_set_offset_limit(scratch.context_, next);
    int found = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), start,
                            PCRE2_NO_UTF_CHECK, scratch.match_data_, scratch.context_);
    if (found >= 0) {
      const PCRE2_SIZE* places = pcre2_get_ovector_pointer(scratch.match_data_);
      match = {places[0], places[1]};
      return true;
    }
    if (found != PCRE2_ERROR_NOMATCH)
      return user_error("a regular expression gave up at byte {}: {}", start, message_of(found));
    if (next == text.size()) return false;
    if (std::chrono::steady_clock::now() > scratch.deadline_)
      return user_error("a regular expression takes too long; given up at byte {}", next);
    start = next;
  }
}

Status Regex::find_all(std::string_view text, RegexScratch& scratch, std::vector<TextRange>& matches) const {
  matches.clear();
  size_t start = 0;
  size_t looked_at = 0;  // matches since the last look at the clock
  while (start <= text.size()) {
    TextRange match{};
    NIBBLE_ASSIGN_OR_RETURN(bool found, find(text, start, scratch, match));
    if (!found) break;
    if (++looked_at == kWindowBytes) {
      looked_at = 0;
      if (std::chrono::steady_clock::now() > scratch.deadline_)
        return user_error("a regular expression takes too long; given up at byte {}", match.end);
    }
    bool empty = match.begin == match.end;
    if (empty && !matches.empty() && matches.back().end == match.end) {
      start += start < text.size() ? first_character(text.substr(start)).size_bytes : 1;
      continue;
    }
    matches.push_back(match);
    start = match.end;
  }
  return {};
}

}  // namespace nibble
