// JSON from untrusted files, bounded before it is parsed; and JSON to files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

// A deeper visitor could run out of stack; more values would take gigabytes.
inline constexpr int kMaxJsonDepth = 64;
inline constexpr int64_t kMaxJsonValues = 16'000'000;

// Counts nesting and values before a parser builds anything; on text that is not JSON the count means
// nothing, and the parser then refuses it.
Status check_json_bounds(std::string_view text, const std::string& name);

// `name` stands for the file in messages. Of duplicate keys the last one counts, as in Python.
Result<nlohmann::ordered_json> parse_json(std::string_view text, const std::string& name);

// The text of a file for people and programs: indented, with a newline at its end.
std::string json_text(const nlohmann::ordered_json& json);

}  // namespace nibble
