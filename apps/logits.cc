// nibble logits: the logits of given token ids, for comparing with other implementations.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "arithmetic.h"
#include "base/log.h"
#include "commands.h"
#include "engine/model_source.h"
#include "ids.h"
#include "model/loaded_model.h"
#include "model_path.h"
#include "ops/backend.h"

namespace nibble {
namespace {

using OutputFile = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// The header of a numpy .npy file, version 1.0: float32, C order; padded so that data starts at a multiple
// of 64.
std::string npy_header(int64_t rows, int64_t cols) {
  std::string dict =
      fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, cols);
  constexpr size_t kPreamble = 10;  // magic, version, u16 length
  while ((kPreamble + dict.size() + 1) % 64 != 0) dict += ' ';
  dict += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(dict.size() & 0xFF);
  header += static_cast<char>(dict.size() >> 8);
  return header + dict;
}

// The model's files are mapped while the output is written: they must not be the same, under whatever name.
Status check_output(const std::string& output, const std::string& model) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::exists(output, ignored)) return {};
  // A GGUF file may lie among files that are no model's: there only weights are not to be written over.
  const bool is_file = !fs::is_directory(model, ignored);
  const fs::path home = is_file ? fs::absolute(model).parent_path() : fs::path(model);
  for (const fs::directory_entry& entry : fs::directory_iterator(home, ignored)) {
    if (is_file && entry.path().extension() != ".gguf") continue;
    if (fs::equivalent(entry.path(), output, ignored))
      return user_error("-o {}: is a file of the model", output);
  }
  return {};
}

}  // namespace

Status logits_command(const LogitsOptions& options) {
  std::vector<int32_t> ids = options.ids;
  if (!options.ids_file.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(std::string text,
                            read_text(FileSystem::posix(), options.ids_file, kMaxInputBytes));
    NIBBLE_ASSIGN_OR_RETURN(ids, parse_ids(text, options.ids_file));
  }
  if (ids.empty()) return user_error("no token ids; give them with --ids 5,17,42 or --ids-file FILE");

  const ModelOptions& m = options.model;
  const FileSystem& files = FileSystem::posix();
  NIBBLE_ASSIGN_OR_RETURN(const ExpertArithmetic arithmetic, arithmetic_of(m));
  NIBBLE_ASSIGN_OR_RETURN(const std::string path, find_model(m.model));
  NIBBLE_RETURN_IF_ERROR(check_output(options.output, path));
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<ModelSource> source, ModelSource::open(files, path));
  NIBBLE_ASSIGN_OR_RETURN(ModelSpec spec, source->spec());
  for (int32_t id : ids) {
    if (id >= spec.vocab) return user_error("token id {} is outside the vocabulary of {}", id, spec.vocab);
  }
  if (static_cast<int64_t>(ids.size()) > spec.max_positions) {
    log_warning("{} tokens are beyond the {} positions that the model was made for", ids.size(),
                spec.max_positions);
  }
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<Ops> ops, make_backend(m.device, backend_options(m)));
  const int64_t tokens = static_cast<int64_t>(ids.size());
  const int64_t chunk = std::min(m.prefill_chunk, tokens), vocab = spec.vocab;
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<WeightSource> weights, source->weights(spec, formats_copied(*ops)));
  NIBBLE_ASSIGN_OR_RETURN(
      LoadedModel model,
      load_model(std::move(weights), std::move(spec), std::move(ops),
                 {.kv = {.max_sequences = 1, .max_tokens = tokens, .max_new_tokens = chunk},
                  .max_rows = chunk,
                  .max_logit_rows = chunk,
                  .arithmetic = arithmetic}));
  OutputFile file(std::fopen(options.output.c_str(), "wb"), std::fclose);
  if (file == nullptr) return user_error("-o {}: cannot write: {}", options.output, std::strerror(errno));
  const std::string header = npy_header(tokens, vocab);
  bool written = std::fwrite(header.data(), 1, header.size(), file.get()) == header.size();
  NIBBLE_ASSIGN_OR_RETURN(int32_t slot, model.decoder->kv().add_sequence());
  for (int64_t at = 0; at < tokens && written; at += chunk) {
    const auto count = static_cast<size_t>(std::min(chunk, tokens - at));
    SequenceStep step{slot, std::span(ids).subspan(static_cast<size_t>(at), count), WantLogits::kAll};
    NIBBLE_ASSIGN_OR_RETURN(Rows<const float> logits, model.decoder->forward(std::span(&step, 1)));
    const auto values = static_cast<size_t>(logits.rows * logits.cols);
    written = std::fwrite(logits.data, sizeof(float), values, file.get()) == values;
  }
  written = std::fclose(file.release()) == 0 && written;
  if (!written) return user_error("-o {}: writing failed: {}", options.output, std::strerror(errno));
  log_info("wrote float32 [{}, {}] to {}", tokens, vocab, options.output);
  return {};
}

}  // namespace nibble
