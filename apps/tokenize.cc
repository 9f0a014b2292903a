// nibble tokenize, nibble detokenize.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>

#include "commands.h"
#include "engine/model_source.h"
#include "ids.h"
#include "model_path.h"

namespace nibble {
namespace {

Result<Tokenizer> load_tokenizer(const std::string& model) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string path, find_model(model));
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<ModelSource> source,
                          ModelSource::open(FileSystem::posix(), path));
  return source->tokenizer();
}

}  // namespace

Status tokenize_command(const TokenizeOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const Tokenizer tokenizer, load_tokenizer(options.model));
  std::string text = options.text.value_or("");
  if (!options.text) {
    NIBBLE_ASSIGN_OR_RETURN(text, read_standard_input());
  }
  NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> ids,
                          tokenizer.encode(text, {.parse_special = !options.no_special}));
  if (options.json) {
    fmt::print("[{}]\n", fmt::join(ids, ", "));
  } else {
    fmt::print("{}\n", fmt::join(ids, ","));
  }
  return {};
}

Status detokenize_command(const DetokenizeOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const Tokenizer tokenizer, load_tokenizer(options.model));
  std::vector<int32_t> ids = options.ids;
  if (ids.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(std::string text, read_standard_input());
    NIBBLE_ASSIGN_OR_RETURN(ids, parse_ids(text, "standard input"));
  }
  for (int32_t id : ids) {
    if (id >= tokenizer.vocab_size()) {
      return user_error("token id {} is outside the vocabulary of {}", id, tokenizer.vocab_size());
    }
  }
  fmt::print("{}\n", tokenizer.decode(ids, options.skip_special));
  return {};
}

}  // namespace nibble
