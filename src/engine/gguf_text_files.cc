#include "engine/gguf_text_files.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/output_file.h"
#include "engine/generation_config.h"
#include "engine/gguf_tokenizer.h"

namespace nibble {
namespace {

using Json = nlohmann::ordered_json;

Result<Json> generation_json(const GgufMetadata& metadata) {
  NIBBLE_ASSIGN_OR_RETURN(const GenerationConfig generation, GenerationConfig::from_gguf(metadata));
  NIBBLE_ASSIGN_OR_RETURN(const GgufVocabulary vocabulary, read_gguf_vocabulary(metadata));
  Json json = Json::object();
  if (vocabulary.bos) json["bos_token_id"] = *vocabulary.bos;
  std::set<int32_t> ends;
  for (const std::optional<int32_t>& id : {vocabulary.eos, vocabulary.eot, vocabulary.eom}) {
    if (id) ends.insert(*id);
  }
  if (!ends.empty()) json["eos_token_id"] = ends;
  const SamplingParams& p = generation.sampling;
  if (metadata.has("general.sampling.temp")) json["temperature"] = p.temperature;
  if (metadata.has("general.sampling.top_k")) json["top_k"] = p.top_k;
  if (metadata.has("general.sampling.top_p")) json["top_p"] = p.top_p;
  if (metadata.has("general.sampling.min_p")) json["min_p"] = p.min_p;
  if (metadata.has("general.sampling.penalty_repeat")) json["repetition_penalty"] = p.repeat_penalty;
  return json;
}

}  // namespace

Result<Json> gguf_special_tokens(const GgufMetadata& metadata) {
  Json tokens = Json::object();
  if (!metadata.has("tokenizer.ggml.tokens")) return tokens;
  using Texts = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const Texts texts, metadata.texts("tokenizer.ggml.tokens"));
  constexpr std::pair<const char*, const char*> kTokens[] = {
      {"bos_token", "tokenizer.ggml.bos_token_id"},
      {"eos_token", "tokenizer.ggml.eos_token_id"},
      {"pad_token", "tokenizer.ggml.padding_token_id"},
      {"unk_token", "tokenizer.ggml.unknown_token_id"}};
  for (const auto& [name, key] : kTokens) {
    if (!metadata.has(key)) continue;
    NIBBLE_ASSIGN_OR_RETURN(const int64_t id, metadata.integer(key, 0, std::ssize(texts) - 1));
    tokens[name] = texts[static_cast<size_t>(id)];
  }
  return tokens;
}

Status write_text_files(const GgufMetadata& metadata, const std::string& directory) {
  NIBBLE_ASSIGN_OR_RETURN(const GgufVocabulary vocabulary, read_gguf_vocabulary(metadata));
  const Result<std::string> tokenizer = gguf_tokenizer_json(vocabulary);
  if (tokenizer.ok()) {
    NIBBLE_RETURN_IF_ERROR(replace_text(join_path(directory, "tokenizer.json"), *tokenizer));
  } else {
    log_warning("{}; copy the tokenizer.json of the original model into the directory",
                tokenizer.status().message());
  }
  NIBBLE_ASSIGN_OR_RETURN(const Json tokens, gguf_special_tokens(metadata));
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  config.update(tokens);
  if (metadata.has("tokenizer.chat_template")) {
    NIBBLE_ASSIGN_OR_RETURN(config["chat_template"], metadata.text("tokenizer.chat_template"));
  }
  NIBBLE_RETURN_IF_ERROR(replace_text(join_path(directory, "tokenizer_config.json"), json_text(config)));
  NIBBLE_ASSIGN_OR_RETURN(const Json generation, generation_json(metadata));
  return replace_text(join_path(directory, "generation_config.json"), json_text(generation));
}

}  // namespace nibble
