// What a user hands in from a file or a pipe; token ids as people write them: integers between spaces, commas
// or lines.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nibble {

// Of a prompt, a text or a list of ids: what the tokenizer takes in one call.
inline constexpr int64_t kMaxInputBytes = 64 << 20;

// `name` stands for the source in messages.
Result<std::vector<int32_t>> parse_ids(std::string_view text, const std::string& name);
// All of standard input, up to kMaxInputBytes.
Result<std::string> read_standard_input();

}  // namespace nibble
