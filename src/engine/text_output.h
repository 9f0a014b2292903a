// From tokens to the text that a user may see: whole characters, and never a part of a stop string.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "text/tokenizer.h"
#include "text/utf8.h"

namespace nibble {

class TextOutput {
 public:
  // `tokenizer` must outlive this. Empty stop strings are ignored.
  TextOutput(const Tokenizer& tokenizer, std::vector<std::string> stop);

  // What can be shown after this token: text that could still become a stop string is held back.
  std::string push(int32_t token);
  // What is left at the end, unless a stop string ended the text.
  std::string finish();
  // A stop string has come; what was before it has been given out, what follows is dropped.
  bool stopped() const { return stopped_; }

 private:
  std::string release(const std::string& text);

  const Tokenizer& tokenizer_;
  std::vector<std::string> stop_;
  Utf8Stream characters_;
  std::string held_;  // whole characters that may be the start of a stop string
  bool stopped_ = false;
};

}  // namespace nibble
