// Any bytes as a chat template over a fixed context: it must end soon, with a text or with an error of one
// line, without a leak and without undefined behaviour.
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "text/chat_template.h"

namespace {

const nlohmann::ordered_json& context() {
  static const auto* const kContext = new nlohmann::ordered_json(nlohmann::ordered_json::parse(R"({
    "messages": [{"role": "system", "content": " a "},
                 {"role": "user", "content": [{"type": "text", "text": "ü😀"}]},
                 {"role": "assistant", "content": null,
                  "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": [1, 2.5, true]}}}]},
                 {"role": "tool", "content": "r\nr"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "add_generation_prompt": true, "i": 7, "f": 2.5, "s": "Hello, Wörld", "l": [3, 1, 2], "n": null,
    "big": 9223372036854775807, "small": -9223372036854775807, "tiny": 1e-300, "huge": 1e300, "d": {"a": 1}
  })"));
  return *kContext;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  nibble::TemplateLimits limits;
  limits.max_steps = 50'000;
  limits.max_output_bytes = 1 << 20;
  limits.max_memory_bytes = 32 << 20;
  const auto parsed =
      nibble::ChatTemplate::parse(std::string(reinterpret_cast<const char*>(data), size), "fuzz", limits);
  if (!parsed.ok()) return 0;
  const auto out = parsed->render(context());
  if (!out.ok() && out.status().message().empty()) std::abort();
  if (out.ok() && static_cast<int64_t>(out->size()) > limits.max_output_bytes) std::abort();
  return 0;
}
