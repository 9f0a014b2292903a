#include "model/convert_gguf.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "base/hash.h"
#include "base/json.h"
#include "base/numbers.h"
#include "base/output_file.h"
#include "checkpoint/quantize_config.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/stacked_names.h"
#include "model/convert_gguf_rows.h"
#include "model/gguf_config.h"
#include "model/gguf_weights.h"
#include "model/weights.h"
#include "ops/backend.h"
#include "quant/float_codes.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"

namespace nibble {
namespace {

using Json = nlohmann::ordered_json;

// A tensor of the checkpoint: a vector, a matrix, or the experts of one parameter.
struct Piece {
  std::string name;  // of the tensor; of a matrix and of stacked ones without an ending
  std::vector<int64_t> shape;
  std::vector<float> values;               // of a vector
  std::vector<std::vector<Matrix>> parts;  // of a matrix one of one; of stacked ones gate and up, or down
};

// Answers a loader from the file and remembers what it wanted: that is what a checkpoint holds.
class Recorder : public WeightSource {
 public:
  explicit Recorder(GgufWeights& from) : from_(from) {}
  std::vector<Piece> pieces() && { return std::move(pieces_); }

  bool has(const std::string& name) const override { return from_.has(name); }
  int64_t total_bytes() const override { return from_.total_bytes(); }
  std::vector<StoredTensor> stored() const override { return from_.stored(); }
  Result<std::vector<float>> floats(const std::string& name, std::span<const int64_t> shape) override {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<float> values, from_.floats(name, shape));
    if (is_new(name))
      pieces_.push_back({.name = name, .shape = {shape.begin(), shape.end()}, .values = values, .parts = {}});
    return values;
  }
  Result<Matrix> matrix(const std::string& prefix, int64_t n, int64_t k) override {
    NIBBLE_ASSIGN_OR_RETURN(const Matrix matrix, from_.matrix(prefix, n, k));
    if (is_new(prefix))
      pieces_.push_back({.name = prefix, .shape = {n, k}, .values = {}, .parts = {{matrix}}});
    return matrix;
  }
  Result<std::vector<Matrix>> stacked(const std::string& name, int64_t experts, int64_t n, int64_t k,
                                      RowSplit split) override {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<Matrix> matrices, from_.stacked(name, experts, n, k, split));
    Piece& piece = piece_of(name, {experts, n, k});
    piece.parts.push_back(matrices);
    return matrices;
  }
  Result<std::vector<float>> stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                          RowSplit split) override {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<float> values, from_.stacked_bias(name, experts, n, split));
    Piece& piece = piece_of(StackedNames(name).bias, {experts, 0});
    // Gate comes first; up goes between its values.
    std::vector<float> both;
    for (size_t i = 0; i < values.size(); ++i) {
      if (!piece.values.empty()) both.push_back(piece.values[i]);
      both.push_back(values[i]);
    }
    piece.shape[1] += n;
    piece.values = std::move(both);
    return values;
  }
  void ignore(const std::string& name) override { from_.ignore(name); }
  std::vector<std::string> unused() const override { return from_.unused(); }
  const std::string& file_of(const std::string& name) const override { return from_.file_of(name); }

 private:
  Piece& piece_of(const std::string& name, std::vector<int64_t> shape) {
    const auto found =
        std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& piece) { return piece.name == name; });
    if (found != pieces_.end()) return *found;
    return pieces_.emplace_back(Piece{.name = name, .shape = std::move(shape), .values = {}, .parts = {}});
  }

  // A loader may ask twice: a tied head is the embedding again.
  bool is_new(const std::string& name) { return names_.insert(name).second; }

  GgufWeights& from_;
  std::vector<Piece> pieces_;
  std::set<std::string> names_;
};

TensorInfo tensor_info(std::string name, DType dtype, std::vector<int64_t> shape) {
  TensorInfo info{.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
  info.bytes = checked_product(info.shape).value() * dtype_bytes(dtype);  // fits: the source did
  return info;
}

// The divisors of rope_freqs as the scaling that made them. Only Llama 3's own ranges are tried: from the
// numbers alone others cannot be told.
Result<Json> scaling_of(const RopeSpec& plain, const std::vector<float>& divisors, const std::string& file) {
  RopeSpec spec = plain;
  spec.type = RopeSpec::Type::kLlama3;
  spec.factor = divisors.empty() ? 1 : *std::max_element(divisors.begin(), divisors.end());
  spec.low_freq_factor = 1;
  spec.high_freq_factor = 4;
  spec.original_max_positions = 8192;
  if (spec.factor >= 1) {
    const std::vector<float> found = rope_frequencies(spec).inv_freq, from = rope_frequencies(plain).inv_freq;
    bool same = found.size() == divisors.size();
    for (size_t i = 0; same && i < found.size(); ++i)
      same = std::fabs(found[i] * divisors[i] - from[i]) <= 1e-4f * from[i];
    if (same) {
      return Json{{"rope_type", "llama3"},
                  {"factor", spec.factor},
                  {"low_freq_factor", spec.low_freq_factor},
                  {"high_freq_factor", spec.high_freq_factor},
                  {"original_max_position_embeddings", 8192}};
    }
  }
  return user_error("{}: tensor 'rope_freqs.weight': scales RoPE in a way that config.json has no words for",
                    file);
}

class Converter {
 public:
  Converter(const Gguf& gguf, const ModelSpec& spec, const ConvertOptions& options)
      : gguf_(gguf), spec_(spec), options_(options), shards_(options.max_shard_bytes) {}

  Status add(const Piece& piece) {
    if (piece.parts.empty()) return add_vector(piece);
    return piece.shape.size() == 3 ? add_stacked(piece) : add_matrix(piece, piece.parts[0][0]);
  }

  std::vector<JobShard> shards() && { return std::move(shards_).finish(); }

  // What config.json says of it; null where no tensor has 4 bits.
  Json quantization() const {
    if (nvfp4_ + mxfp4_ == 0) return nullptr;
    std::vector<std::string> unquantized = unquantized_;
    std::sort(unquantized.begin(), unquantized.end());
    if (nvfp4_ > 0) return modelopt_config(unquantized, activation_scales_ == nvfp4_);
    return quantization_config({.type = QuantizeType::kMxfp4,
                                .gpt_oss = spec_.family == "gpt_oss",
                                .unquantized_modules = std::move(unquantized)});
  }
  bool is_modelopt() const { return nvfp4_ > 0; }
  const ConvertSummary& summary() const { return summary_; }

 private:
  // Heads of q and k whose rows have to move; 0 for all else.
  int64_t head_dim_of(const std::string& name) const {
    const auto* gqa = std::get_if<GqaSpec>(&spec_.layers.front().mixer);
    const bool turns = name.find(".q_proj") != std::string::npos || name.find(".k_proj") != std::string::npos;
    return turns && gqa != nullptr && gqa->rope_style == RopeStyle::kInterleaved ? gqa->head_dim : 0;
  }

  // BF16 where that loses nothing, else F32.
  Status add_vector(const Piece& piece) {
    std::vector<float> values(piece.values.size());
    const int64_t head_dim = head_dim_of(piece.name);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = piece.values[static_cast<size_t>(gguf_file_row(static_cast<int64_t>(i), head_dim))];
    std::vector<uint16_t> halves;
    std::transform(values.begin(), values.end(), std::back_inserter(halves), float_to_bf16);
    const bool exact = std::equal(values.begin(), values.end(), halves.begin(),
                                  [](float value, uint16_t half) { return bf16_to_float(half) == value; });
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
    shards_.add({tensor_info(piece.name, exact ? DType::kBF16 : DType::kF32, piece.shape)},
                {[exact, bytes, values, halves](const WriteTensor& write, const ReadBytes& read) {
                  read(bytes);
                  return write(0, 0,
                               exact ? std::as_bytes(std::span(halves)) : std::as_bytes(std::span(values)));
                }},
                count(bytes));
    return {};
  }

  Status add_matrix(const Piece& piece, const Matrix& matrix) {
    const int64_t n = matrix.n, k = matrix.k, head_dim = head_dim_of(piece.name);
    const std::string weight = piece.name + ".weight";
    const int64_t bytes = count(matrix_bytes(matrix.format, n, k));
    const auto nvfp4_outputs = [&] {
      return std::vector<TensorInfo>{tensor_info(weight, DType::kU8, {n, k / 2}),
                                     tensor_info(weight + "_scale", DType::kF8E4M3, {n, k / nvfp4::kGroup}),
                                     tensor_info(weight + "_scale_2", DType::kF32, {})};
    };
    switch (matrix.format) {
      case MatrixFormat::kF32:
      case MatrixFormat::kF16:
      case MatrixFormat::kBF16: {
        unquantized_.push_back(piece.name);
        const DType dtype = matrix.format == MatrixFormat::kF32   ? DType::kF32
                            : matrix.format == MatrixFormat::kF16 ? DType::kF16
                                                                  : DType::kBF16;
        shards_.add({tensor_info(weight, dtype, {n, k})},
                    {[=](const WriteTensor& write, const ReadBytes& read) {
                      return write_rows(matrix, head_dim, write, read);
                    }},
                    bytes);
        return {};
      }
      case MatrixFormat::kGgufNvfp4: {
        ++nvfp4_;
        ++summary_.kept;
        std::vector<TensorInfo> outputs = nvfp4_outputs();
        if (matrix.input_scale > 0) {
          ++activation_scales_;
          outputs.push_back(tensor_info(piece.name + ".input_scale", DType::kF32, {}));
        }
        shards_.add(std::move(outputs),
                    {[=, file = gguf_.path()](const WriteTensor& write, const ReadBytes& read) {
                      return write_nvfp4(matrix, head_dim, file, weight, write, read);
                    }},
                    bytes);
        return {};
      }
      case MatrixFormat::kGgufMxfp4:
        ++mxfp4_;
        ++summary_.kept;
        shards_.add({tensor_info(weight + "_packed", DType::kU8, {n, k / 2}),
                     tensor_info(weight + "_scale", DType::kU8, {n, k / mxfp4::kGroup})},
                    {[=](const WriteTensor& write, const ReadBytes& read) {
                      return write_mxfp4(matrix, head_dim, write, read);
                    }},
                    bytes);
        return {};
      default:
        break;
    }
    if (options_.requantize && wants_quantization(weight, QuantizeWhat::kAllLinear) &&
        k % nvfp4::kGroup == 0) {
      ++nvfp4_;
      ++summary_.requantized;
      shards_.add(nvfp4_outputs(), {[=](const WriteTensor& write, const ReadBytes& read) {
                    return quantize_to_nvfp4(matrix, head_dim, write, read);
                  }},
                  bytes);
      return {};
    }
    ++summary_.decoded;
    unquantized_.push_back(piece.name);
    shards_.add({tensor_info(weight, DType::kBF16, {n, k})},
                {[=](const WriteTensor& write, const ReadBytes& read) {
                  return write_bf16_rows(matrix, head_dim, write, read);
                }},
                bytes);
    return {};
  }

  // gpt-oss: gate and up in turn; MXFP4 with its bits, all else transposed in BF16.
  Status add_stacked(const Piece& piece) {
    const int64_t experts = piece.shape[0], n = piece.shape[1], k = piece.shape[2];
    const auto halves = std::ssize(piece.parts);
    bool is_mxfp4 = true;
    int64_t bytes = 0;
    for (const std::vector<Matrix>& part : piece.parts) {
      for (const Matrix& matrix : part) {
        is_mxfp4 = is_mxfp4 && matrix.format == MatrixFormat::kGgufMxfp4;
        bytes += matrix_bytes(matrix.format, n, k);
      }
    }
    std::vector<TensorInfo> outputs;
    if (is_mxfp4) {
      const StackedNames names(piece.name);
      const int64_t groups = k / mxfp4::kGroup;
      outputs = {tensor_info(names.blocks, DType::kU8, {experts, n * halves, groups, 16}),
                 tensor_info(names.scales, DType::kU8, {experts, n * halves, groups})};
      mxfp4_ += experts * halves;
      summary_.kept += experts * halves;
    } else {
      outputs = {tensor_info(piece.name, DType::kBF16, {experts, k, n * halves})};
      summary_.decoded += experts * halves;
    }
    std::vector<JobShard::Unit> units;
    for (int64_t e = 0; e < experts; ++e) {
      std::vector<Matrix> parts;
      for (const std::vector<Matrix>& part : piece.parts) parts.push_back(part[static_cast<size_t>(e)]);
      units.emplace_back([=](const WriteTensor& write, const ReadBytes& read) {
        return is_mxfp4 ? write_mxfp4_expert(parts, e, write, read)
                        : write_transposed_expert(parts, e, write, read);
      });
    }
    shards_.add(std::move(outputs), std::move(units), count(bytes));
    return {};
  }

  int64_t count(int64_t bytes) {
    summary_.source_bytes += bytes;
    return bytes;
  }

  const Gguf& gguf_;
  const ModelSpec& spec_;
  const ConvertOptions& options_;
  ShardBuilder shards_;
  std::vector<std::string> unquantized_;
  int64_t nvfp4_ = 0, mxfp4_ = 0, activation_scales_ = 0;  // matrices
  ConvertSummary summary_;
};

// config.json of the checkpoint that the file was made of, as far as the file tells.
Json checkpoint_config(const Json& from_gguf, const std::string& arch) {
  static const std::map<std::string, const char*> kArchitectures = {
      {"glm4_moe", "Glm4MoeForCausalLM"},  {"gpt_oss", "GptOssForCausalLM"},  {"laguna", "LagunaForCausalLM"},
      {"llama", "LlamaForCausalLM"},       {"mixtral", "MixtralForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"},
      {"qwen3_moe", "Qwen3MoeForCausalLM"}};
  Json config = {{"architectures", {kArchitectures.at(from_gguf["model_type"].get<std::string>())}}};
  for (const auto& [key, value] : from_gguf.items()) {
    if (!key.starts_with(arch + ".")) config[key] = value;
  }
  config.erase("rope_interleaved");          // rows are back in the order of halves
  config.erase("num_nextn_predict_layers");  // which are left out
  return config;
}

}  // namespace

Result<ConvertSummary> convert_gguf(const std::shared_ptr<Gguf>& gguf, const ConvertOptions& options,
                                    const std::function<Status(const std::string&)>& write_text_files) {
  NIBBLE_RETURN_IF_ERROR(check_apart(options.source, options.destination));
  NIBBLE_ASSIGN_OR_RETURN(const Config gguf_says, gguf_config(*gguf));
  NIBBLE_ASSIGN_OR_RETURN(const ModelSpec spec, load_gguf_spec(*gguf));
  NIBBLE_ASSIGN_OR_RETURN(const std::string arch, gguf->metadata().text("general.architecture"));
  Json config = checkpoint_config(gguf_says.json(), arch);

  GgufWeights weights(gguf, spec);
  Recorder recorder(weights);
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<Ops> ops, make_backend("reference", {.threads = 1}));
  NIBBLE_RETURN_IF_ERROR(load_weights(spec, recorder, *ops).status());
  Converter converter(*gguf, spec, options);
  uint64_t headers = hash_text(json_text(config));
  for (const Piece& piece : std::move(recorder).pieces()) {
    if (piece.name == spec.names.rope_divisors) {
      NIBBLE_ASSIGN_OR_RETURN(const Json scaling, scaling_of(spec.ropes.front(), piece.values, gguf->path()));
      config["rope_parameters"].update(scaling);
      continue;
    }
    NIBBLE_RETURN_IF_ERROR(converter.add(piece));
  }
  for (const GgufTensorInfo* tensor : gguf->tensors()) {
    headers = hash_text(fmt::format("{}\n{}{}@{}\n", tensor->name, tensor->type->name,
                                    format_shape(tensor->shape), tensor->begin),
                        headers);
  }
  const Json quantization = converter.quantization();
  const bool is_modelopt = converter.is_modelopt();
  if (!quantization.is_null()) config["quantization_config"] = quantization;

  ConvertSummary summary = converter.summary();
  CheckpointJob job;
  job = {.destination = options.destination,
         .identity = {{"--type", options.requantize ? "nvfp4" : "none"},
                      {"--max-shard-size", std::to_string(options.max_shard_bytes)},
                      {"source", canonical_path(options.source)},
                      {"source headers", fmt::format("{:016x}", headers)},
                      {"version", options.version}},
         .shards = std::move(converter).shards(),
         .write_other_files = [&](const std::string& to) -> Status {
           NIBBLE_RETURN_IF_ERROR(write_text_files(to));
           NIBBLE_RETURN_IF_ERROR(replace_text(join_path(to, "config.json"), json_text(config)));
           if (is_modelopt) {
             NIBBLE_RETURN_IF_ERROR(replace_text(join_path(to, "hf_quant_config.json"),
                                                 json_text(hf_quant_config(quantization, options.version))));
           }
           return write_shard_index(job.shards, to);
         },
         .threads = options.threads,
         .progress = options.progress};
  summary.shards = std::ssize(job.shards);
  summary.output_bytes = output_bytes(job.shards);
  NIBBLE_ASSIGN_OR_RETURN(summary.resumed_shards, run_checkpoint_job(job));
  return summary;
}

}  // namespace nibble
