// Token ids as people write them: integers between spaces, commas or lines.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nibble {

// `name` stands for the source in messages.
Result<std::vector<int32_t>> parse_ids(std::string_view text, const std::string& name);
// All of standard input, up to a limit.
Result<std::string> read_standard_input();

}  // namespace nibble
