// Where the tests' files lie: in the source and build trees that made the binary, or where the environment
// says, on a machine that has the binaries alone (tools/gpu_bundle.sh).
#pragma once

#include <cstdlib>
#include <string>

namespace nibble {

inline std::string place_or(const char* variable, const char* built_in) {
  const char* value = std::getenv(variable);
  return value != nullptr ? value : built_in;
}
inline std::string source_directory() { return place_or("NIBBLE_TEST_SOURCE_DIR", NIBBLE_SOURCE_DIR); }
inline std::string binary_directory() { return place_or("NIBBLE_TEST_BINARY_DIR", NIBBLE_BINARY_DIR); }

inline std::string demo_directory() { return source_directory() + "/models/demo"; }
inline std::string golden_directory(const std::string& name) {
  return binary_directory() + "/golden/" + name;
}

}  // namespace nibble
