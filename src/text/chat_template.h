// Chat templates: the Jinja of Hugging Face's tokenizer_config.json / chat_template.jinja, rendered as
// transformers does it (trim_blocks, lstrip_blocks, loop controls, a sandbox, tojson without HTML escapes).
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

// A template is untrusted input: each limit ends rendering with an error that names it.
struct TemplateLimits {
  int64_t max_source_bytes = 1 << 20;
  int64_t max_output_bytes = 16 << 20;
  int64_t max_steps = 2'000'000;  // evaluated nodes; ends a template that loops for ever
  int max_depth = 200;            // nesting of expressions, blocks and macro calls, in parser and renderer
  int64_t max_memory_bytes = 256 << 20;  // all values of one rendering, which live until it ends
};

// Immutable after parsing; safe for concurrent use.
class ChatTemplate {
 public:
  // `name` stands for the template in messages, which also give the line.
  static Result<ChatTemplate> parse(std::string source, const std::string& name,
                                    const TemplateLimits& limits = {});

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // `context` is a JSON object of the template's variables: messages, tools, add_generation_prompt,
  // bos_token, eos_token, ... What the template raises (raise_exception) comes back as a user error with its
  // words. `now` is what strftime_now shows; null is the local time.
  Result<std::string> render(const nlohmann::ordered_json& context, const std::tm* now = nullptr) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace nibble
