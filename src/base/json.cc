#include "base/json.h"

namespace nibble {
Status check_json_bounds(std::string_view text, const std::string& name) {
  int depth = 0;
  int64_t values = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '[' || c == '{') {
      ++values;
      if (++depth > kMaxJsonDepth)
        return user_error("{}: nested more than {} deep at byte {}", name, kMaxJsonDepth, i);
    }
    if (c == ']' || c == '}') --depth;
    if (c == ',' && ++values > kMaxJsonValues)
      return user_error("{}: more than {} values", name, kMaxJsonValues);
  }
  return {};
}

Result<nlohmann::ordered_json> parse_json(std::string_view text, const std::string& name) {
  NIBBLE_RETURN_IF_ERROR(check_json_bounds(text, name));
  try {
    return nlohmann::ordered_json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    std::string what = error.what();
    if (size_t end = what.find("] "); end != std::string::npos) what = what.substr(end + 2);
    return user_error("{}: not valid JSON: {}", name, what);
  }
}

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace nibble
