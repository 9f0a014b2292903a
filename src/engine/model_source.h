// A model as a user names it, in whatever files: a directory as Hugging Face lays it out, or GGUF. Each part
// is read when it is asked for, so that what is wrong with one does not hide the others.
#pragma once

#include <memory>
#include <string>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/convert.h"
#include "checkpoint/weight_source.h"
#include "engine/chat_format.h"
#include "engine/generation_config.h"
#include "model/spec.h"
#include "ops/ops.h"
#include "text/tokenizer.h"

namespace nibble {

// `ops` must outlive the answer.
inline FormatsCopied formats_copied(const Ops& ops) {
  return [&ops](MatrixFormat format) { return ops.copies_weights(format); };
}

class ModelSource {
 public:
  // `path`: a directory, a GGUF file (of several parts the first), or a synthetic model (synthetic_model.h).
  // A directory without config.json that holds one model in GGUF stands for that. `files` must outlive the
  // source.
  static Result<std::unique_ptr<ModelSource>> open(const FileSystem& files, const std::string& path);

  virtual ~ModelSource() = default;
  virtual Result<ModelSpec> spec() const = 0;
  virtual Result<Tokenizer> tokenizer() const = 0;
  // `override_path` names a template file to take instead of the model's own.
  virtual Result<ChatFormat> chat(const std::string& override_path = "") const = 0;
  virtual Result<GenerationConfig> generation(int64_t vocab) const = 0;
  // `spec` is this model's.
  // `copied` says of which formats nobody computes on the source's own bytes.
  virtual Result<std::unique_ptr<WeightSource>> weights(const ModelSpec& spec,
                                                        const FormatsCopied& copied) const = 0;
  // The same model in ModelOpt's layout, at options.destination. REQUIRES options.source to be this one.
  virtual Result<ConvertSummary> convert(const ConvertOptions& options) const = 0;
};

}  // namespace nibble
