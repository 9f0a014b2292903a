// JSON from untrusted files, bounded before it is parsed.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

// `name` stands for the file in messages. Nesting deeper than max_depth is refused before parsing, so that no
// visitor of the result can run out of stack. Of duplicate keys the last one counts, as in Python.
Result<nlohmann::ordered_json> parse_json(std::string_view text, const std::string& name, int max_depth = 64);

}  // namespace nibble
