#include "engine/model_source.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf.h"
#include "engine/gguf_text_files.h"
#include "engine/gguf_tokenizer.h"
#include "model/convert_gguf.h"
#include "model/gguf_config.h"
#include "model/gguf_weights.h"
#include "model/synthetic_model.h"
#include "model/synthetic_weights.h"

namespace nibble {
namespace {

class DirectoryModel : public ModelSource {
 public:
  DirectoryModel(const FileSystem& files, std::string directory)
      : files_(files), directory_(std::move(directory)) {}

  Result<ModelSpec> spec() const override { return load_spec(files_, directory_); }
  Result<Tokenizer> tokenizer() const override { return Tokenizer::load(files_, directory_); }
  Result<ChatFormat> chat(const std::string& override_path) const override {
    return ChatFormat::load(files_, directory_, override_path);
  }
  Result<GenerationConfig> generation(int64_t vocab) const override {
    return GenerationConfig::load(files_, directory_, vocab);
  }
  Result<std::unique_ptr<WeightSource>> weights(const ModelSpec& /*spec*/,
                                                const FormatsCopied& /*copied*/) const override {
    NIBBLE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(files_, directory_));
    return std::unique_ptr<WeightSource>(std::make_unique<Checkpoint>(std::move(checkpoint)));
  }
  Result<ConvertSummary> convert(const ConvertOptions& options) const override {
    return convert_compressed_tensors(files_, options);
  }

 private:
  const FileSystem& files_;
  const std::string directory_;
};

class GgufModel : public ModelSource {
 public:
  GgufModel(const FileSystem& files, Gguf gguf)
      : files_(files), gguf_(std::make_shared<Gguf>(std::move(gguf))) {}

  Result<ModelSpec> spec() const override { return load_gguf_spec(*gguf_); }
  Result<Tokenizer> tokenizer() const override { return load_gguf_tokenizer(gguf_->metadata()); }
  Result<ChatFormat> chat(const std::string& override_path) const override {
    return ChatFormat::from_gguf(files_, gguf_->metadata(), override_path);
  }
  Result<GenerationConfig> generation(int64_t /*vocab*/) const override {
    return GenerationConfig::from_gguf(gguf_->metadata());
  }
  Result<std::unique_ptr<WeightSource>> weights(const ModelSpec& spec,
                                                const FormatsCopied& /*copied*/) const override {
    return std::unique_ptr<WeightSource>(std::make_unique<GgufWeights>(gguf_, spec));
  }
  Result<ConvertSummary> convert(const ConvertOptions& options) const override {
    return convert_gguf(gguf_, options, [&](const std::string& directory) {
      return write_text_files(gguf_->metadata(), directory);
    });
  }

 private:
  const FileSystem& files_;
  std::shared_ptr<Gguf> gguf_;
};

class SyntheticModel : public ModelSource {
 public:
  explicit SyntheticModel(std::string name) : name_(std::move(name)) {}

  Result<ModelSpec> spec() const override { return synthetic_spec(name_); }
  Result<Tokenizer> tokenizer() const override { return has_no("tokenizer"); }
  Result<ChatFormat> chat(const std::string& /*override_path*/) const override {
    return has_no("chat template");
  }
  Result<GenerationConfig> generation(int64_t /*vocab*/) const override { return GenerationConfig(); }
  Result<std::unique_ptr<WeightSource>> weights(const ModelSpec& spec,
                                                const FormatsCopied& copied) const override {
    NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<SyntheticWeights> weights,
                            SyntheticWeights::make(spec, name_, copied));
    return std::unique_ptr<WeightSource>(std::move(weights));
  }
  Result<ConvertSummary> convert(const ConvertOptions& /*options*/) const override {
    return user_error("model '{}': is synthetic, so there is nothing to convert", name_);
  }

 private:
  Status has_no(const char* what) const {
    return user_error("model '{}': is synthetic and has no {}; bench and logits run it", name_, what);
  }

  const std::string name_;
};

// Whether a file is a part other than the first: "x-00002-of-00003.gguf".
bool is_later_part(const std::string& name) {
  constexpr size_t kSuffix = sizeof("-00001-of-00003.gguf") - 1;
  if (name.size() < kSuffix) return false;
  const std::string suffix = name.substr(name.size() - kSuffix);
  return suffix[0] == '-' && suffix.substr(6, 4) == "-of-" && suffix.substr(1, 5) != "00001";
}

// The GGUF file that a directory stands for; empty: none.
Result<std::string> find_gguf(const FileSystem& files, const std::string& directory) {
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(Names names, files.list(directory));
  std::erase_if(names,
                [](const std::string& name) { return !name.ends_with(".gguf") || is_later_part(name); });
  if (names.empty()) return std::string();
  std::sort(names.begin(), names.end());
  if (names.size() == 1) return join_path(directory, names.front());
  constexpr size_t kNamed = 4;
  const size_t more = names.size() > kNamed ? names.size() - kNamed : 0;
  names.resize(names.size() - more);
  return user_error("{}: holds several models: {}{}; name one of them", directory, fmt::join(names, ", "),
                    more > 0 ? fmt::format(" and {} more", more) : "");
}

}  // namespace

Result<std::unique_ptr<ModelSource>> ModelSource::open(const FileSystem& files, const std::string& path) {
  if (is_synthetic(path)) return std::unique_ptr<ModelSource>(std::make_unique<SyntheticModel>(path));
  std::string gguf_path = path;
  if (files.is_directory(path)) {
    gguf_path.clear();
    if (!files.exists(join_path(path, "config.json"))) {
      NIBBLE_ASSIGN_OR_RETURN(gguf_path, find_gguf(files, path));
    }
    if (gguf_path.empty()) return std::unique_ptr<ModelSource>(std::make_unique<DirectoryModel>(files, path));
  } else if (!files.exists(path)) {
    return user_error(
        "model '{}': no such file or directory; give a directory with config.json, tokenizer.json and "
        "model.safetensors, or a GGUF file",
        path);
  }
  NIBBLE_ASSIGN_OR_RETURN(Gguf gguf, Gguf::open(files, gguf_path));
  return std::unique_ptr<ModelSource>(std::make_unique<GgufModel>(files, std::move(gguf)));
}

}  // namespace nibble
