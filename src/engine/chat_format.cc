#include "engine/chat_format.h"

#include <utility>

#include "base/json.h"
#include "engine/gguf_text_files.h"

namespace nibble {
namespace {

constexpr int64_t kMaxConfigBytes = 64 << 20;  // tokenizer_config.json of some models lists every added token
constexpr int64_t kMaxTemplateBytes = 1 << 20;

// A special token is a string or an object with its "content".
std::optional<std::string> token_text(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string()) {
    return value["content"].get<std::string>();
  }
  return std::nullopt;
}

std::optional<std::string> inline_template(const nlohmann::ordered_json& config) {
  if (!config.contains("chat_template")) return std::nullopt;
  const nlohmann::ordered_json& value = config["chat_template"];
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return std::nullopt;
  for (const nlohmann::ordered_json& entry : value) {
    if (entry.is_object() && entry.value("name", nlohmann::ordered_json()) == "default" &&
        entry.contains("template") && entry["template"].is_string()) {
      return entry["template"].get<std::string>();
    }
  }
  return std::nullopt;
}

}  // namespace

Result<ChatFormat> ChatFormat::load(const FileSystem& files, const std::string& directory,
                                    const std::string& override_path) {
  ChatFormat format;
  format.model_ = directory;
  std::optional<std::string> source;
  std::string name = override_path;
  if (std::string path = join_path(directory, "tokenizer_config.json"); files.exists(path)) {
    NIBBLE_ASSIGN_OR_RETURN(std::string text, read_text(files, path, kMaxConfigBytes));
    NIBBLE_ASSIGN_OR_RETURN(nlohmann::ordered_json config, parse_json(text, path));
    if (!config.is_object()) return user_error("{}: wanted a JSON object", path);
    nlohmann::ordered_json tokens = nlohmann::ordered_json::object();
    for (const char* key : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
      if (!config.contains(key)) continue;
      if (std::optional<std::string> token = token_text(config[key])) tokens[key] = *token;
    }
    format.special_tokens_json_ = tokens.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    source = inline_template(config);
    if (source && override_path.empty()) name = path + " (chat_template)";
  }
  std::string own_file = join_path(directory, "chat_template.jinja");
  if (!override_path.empty() || files.exists(own_file)) {
    if (override_path.empty()) name = own_file;
    NIBBLE_ASSIGN_OR_RETURN(source, read_text(files, name, kMaxTemplateBytes));
  }
  if (source) {
    NIBBLE_ASSIGN_OR_RETURN(format.template_, ChatTemplate::parse(std::move(*source), name));
  }
  return format;
}

Result<ChatFormat> ChatFormat::from_gguf(const FileSystem& files, const GgufMetadata& metadata,
                                         const std::string& override_path) {
  constexpr const char* kTemplate = "tokenizer.chat_template";
  ChatFormat format;
  format.model_ = metadata.name();
  NIBBLE_ASSIGN_OR_RETURN(const nlohmann::ordered_json tokens, gguf_special_tokens(metadata));
  format.special_tokens_json_ = tokens.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string source, name = override_path;
  if (!override_path.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(source, read_text(files, override_path, kMaxTemplateBytes));
  } else if (metadata.has(kTemplate)) {
    name = fmt::format("{} ({})", metadata.name(), kTemplate);
    NIBBLE_ASSIGN_OR_RETURN(source, metadata.text(kTemplate));
  } else {
    return format;
  }
  NIBBLE_ASSIGN_OR_RETURN(format.template_, ChatTemplate::parse(std::move(source), name));
  return format;
}

Result<std::string> ChatFormat::render(const nlohmann::ordered_json& messages,
                                       bool add_generation_prompt) const {
  if (!template_) {
    return user_error(
        "{}: the model has no chat template; give one with --chat-template FILE, or a plain prompt with -p",
        model_);
  }
  nlohmann::ordered_json context = nlohmann::ordered_json::parse(special_tokens_json_);
  context["messages"] = messages;
  context["add_generation_prompt"] = add_generation_prompt;
  return template_->render(context);
}

}  // namespace nibble
