// How a model wants a conversation to be written: its chat template and the names of its special tokens.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/gguf_metadata.h"
#include "text/chat_template.h"

namespace nibble {

class ChatFormat {
 public:
  // From DIRECTORY: chat_template.jinja, else "chat_template" of tokenizer_config.json (a string, or a list
  // in which "default" counts); `override_path` names a template file to take instead. A model without a
  // template gives a format whose render() says so.
  static Result<ChatFormat> load(const FileSystem& files, const std::string& directory,
                                 const std::string& override_path = "");
  // The same from tokenizer.chat_template.
  static Result<ChatFormat> from_gguf(const FileSystem& files, const GgufMetadata& metadata,
                                      const std::string& override_path = "");

  bool has_template() const { return template_.has_value(); }
  // `messages`: [{"role": ..., "content": ...}, ...]. With add_generation_prompt the text ends where the
  // assistant's answer starts.
  Result<std::string> render(const nlohmann::ordered_json& messages, bool add_generation_prompt) const;

 private:
  std::optional<ChatTemplate> template_;
  std::string model_;                       // for messages
  std::string special_tokens_json_ = "{}";  // bos_token, eos_token, ... as the template's variables
};

}  // namespace nibble
