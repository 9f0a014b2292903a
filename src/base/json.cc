#include "base/json.h"

namespace nibble {
namespace {

// The deepest nesting of [ and { outside strings; needs no valid JSON.
int nesting(std::string_view text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

Result<nlohmann::ordered_json> parse_json(std::string_view text, const std::string& name, int max_depth) {
  if (nesting(text) > max_depth)
    return user_error("{}: JSON is nested more than {} levels deep", name, max_depth);
  try {
    return nlohmann::ordered_json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    std::string what = error.what();
    if (size_t end = what.find("] "); end != std::string::npos) what = what.substr(end + 2);
    return user_error("{}: not valid JSON: {}", name, what);
  }
}

}  // namespace nibble
