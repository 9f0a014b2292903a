#include "engine/gguf_tokenizer.h"

#include <limits>
#include <utility>

namespace nibble {
namespace {

constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

Result<std::optional<int32_t>> optional_id(const GgufMetadata& metadata, const char* key) {
  if (!metadata.has(key)) return std::optional<int32_t>();
  NIBBLE_ASSIGN_OR_RETURN(const int64_t id, metadata.integer(key, 0, kMaxId));
  return std::optional<int32_t>(static_cast<int32_t>(id));
}

Result<std::optional<bool>> optional_boolean(const GgufMetadata& metadata, const char* key) {
  if (!metadata.has(key)) return std::optional<bool>();
  NIBBLE_ASSIGN_OR_RETURN(const bool value, metadata.boolean(key));
  return std::optional<bool>(value);
}

// Switches that are implemented in one position.
Status refuse_true(const GgufMetadata& metadata, const char* key) {
  NIBBLE_ASSIGN_OR_RETURN(const bool value, metadata.boolean(key, false));
  return value ? metadata.wrong(key, "false (true is not implemented)") : Status();
}

Status read_scores(const GgufMetadata& metadata, std::vector<float>& scores) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<double> numbers, metadata.numbers("tokenizer.ggml.scores"));
  scores.reserve(numbers.size());
  for (double number : numbers) scores.push_back(static_cast<float>(number));
  return {};
}

Status read_types(const GgufMetadata& metadata, std::vector<GgufTokenType>& types) {
  constexpr const char* kKey = "tokenizer.ggml.token_type";
  if (!metadata.has(kKey)) return {};
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers,
                          metadata.integers(kKey, 0, static_cast<int64_t>(GgufTokenType::kByte)));
  types.reserve(numbers.size());
  for (int64_t number : numbers) types.push_back(static_cast<GgufTokenType>(number));
  return {};
}

}  // namespace

Result<GgufVocabulary> read_gguf_vocabulary(const GgufMetadata& metadata) {
  GgufVocabulary vocabulary;
  vocabulary.name = metadata.name();
  NIBBLE_ASSIGN_OR_RETURN(vocabulary.model, metadata.text("tokenizer.ggml.model"));
  NIBBLE_ASSIGN_OR_RETURN(vocabulary.pre, metadata.text("tokenizer.ggml.pre", ""));
  NIBBLE_ASSIGN_OR_RETURN(vocabulary.tokens, metadata.texts("tokenizer.ggml.tokens"));
  NIBBLE_RETURN_IF_ERROR(read_types(metadata, vocabulary.types));
  if (vocabulary.model == "llama") {
    NIBBLE_RETURN_IF_ERROR(read_scores(metadata, vocabulary.scores));
    vocabulary.bos = 1;
    vocabulary.eos = 2;
    vocabulary.unknown = 0;
  } else if (vocabulary.model == "gpt2") {
    NIBBLE_ASSIGN_OR_RETURN(vocabulary.merges, metadata.texts("tokenizer.ggml.merges"));
  }
  const std::pair<const char*, std::optional<int32_t>*> ids[] = {
      {"tokenizer.ggml.bos_token_id", &vocabulary.bos},
      {"tokenizer.ggml.eos_token_id", &vocabulary.eos},
      {"tokenizer.ggml.eot_token_id", &vocabulary.eot},
      {"tokenizer.ggml.eom_token_id", &vocabulary.eom},
      {"tokenizer.ggml.unknown_token_id", &vocabulary.unknown}};
  for (const auto& [key, place] : ids) {
    NIBBLE_ASSIGN_OR_RETURN(const std::optional<int32_t> id, optional_id(metadata, key));
    if (id.has_value()) *place = id;
  }
  NIBBLE_ASSIGN_OR_RETURN(vocabulary.add_bos, optional_boolean(metadata, "tokenizer.ggml.add_bos_token"));
  NIBBLE_ASSIGN_OR_RETURN(vocabulary.add_eos, optional_boolean(metadata, "tokenizer.ggml.add_eos_token"));
  NIBBLE_ASSIGN_OR_RETURN(vocabulary.add_space_prefix,
                          optional_boolean(metadata, "tokenizer.ggml.add_space_prefix"));
  NIBBLE_RETURN_IF_ERROR(refuse_true(metadata, "tokenizer.ggml.remove_extra_whitespaces"));
  NIBBLE_RETURN_IF_ERROR(refuse_true(metadata, "tokenizer.ggml.add_sep_token"));
  return vocabulary;
}

Result<Tokenizer> load_gguf_tokenizer(const GgufMetadata& metadata) {
  NIBBLE_ASSIGN_OR_RETURN(const GgufVocabulary vocabulary, read_gguf_vocabulary(metadata));
  return Tokenizer::from_gguf(vocabulary);
}

}  // namespace nibble
