#include "checkpoint/convert.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/hash.h"
#include "base/json.h"
#include "base/numbers.h"
#include "base/output_file.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize_config.h"

namespace nibble {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr std::string_view kPacked = ".weight_packed", kGlobalScale = ".weight_global_scale",
                           kInputScale = ".input_global_scale";
// ModelOpt's names of the last two.
constexpr std::string_view kTensorScale = ".weight_scale_2", kModelOptInputScale = ".input_scale";

using Json = nlohmann::ordered_json;

std::optional<std::string> module_of(const std::string& name, std::string_view end) {
  if (!name.ends_with(end)) return std::nullopt;
  return name.substr(0, name.size() - end.size());
}

Result<Json> read_config(const FileSystem& files, const std::string& directory) {
  const std::string path = join_path(directory, "config.json");
  if (!files.exists(path)) return user_error("{}: is missing; wanted a model directory", path);
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_text(files, path, kMaxConfigBytes));
  NIBBLE_ASSIGN_OR_RETURN(Json config, parse_json(text, path));
  if (!config.is_object()) return user_error("{}: wanted a JSON object", path);
  return config;
}

class Converter {
 public:
  Converter(const ConvertOptions& options, Checkpoint& checkpoint)
      : checkpoint_(checkpoint), shards_(options.max_shard_bytes) {}

  Status add_all() {
    for (const TensorInfo* tensor : checkpoint_.tensors()) {
      source_bytes_ += tensor->bytes;
      NIBBLE_RETURN_IF_ERROR(add(*tensor));
    }
    if (kept_ > 0) return {};
    return user_error("{}: nothing to convert: no tensor is called ....weight_packed",
                      checkpoint_.directory());
  }

  std::vector<JobShard> shards() && { return std::move(shards_).finish(); }
  int64_t kept() const { return kept_; }
  int64_t source_bytes() const { return source_bytes_; }
  // A reader of "NVFP4" waits for an activation scale of every matrix.
  bool has_activation_scales() const { return activation_scales_ == kept_; }
  const std::vector<std::string>& unquantized_modules() const { return unquantized_; }

 private:
  Status add(const TensorInfo& tensor) {
    if (const auto module = module_of(tensor.name, kPacked)) return add_matrix(*module, tensor);
    const auto with_packed = [&](std::string_view end) {
      const auto module = module_of(tensor.name, end);
      return module && checkpoint_.has(*module + std::string(kPacked)) ? module : std::nullopt;
    };
    if (with_packed(kGlobalScale)) {  // goes with its matrix
      source_bytes_ -= tensor.bytes;
      return {};
    }
    if (const auto module = with_packed(kInputScale)) {
      NIBBLE_ASSIGN_OR_RETURN(const std::vector<float> scale, checkpoint_.floats(tensor.name, tensor.shape));
      const bool is_scale = scale.size() == 1 && scale.front() >= 0;
      if (!is_scale || (scale.front() > 0 && !std::isfinite(1.0f / scale.front()))) {
        return user_error("{}: tensor {}: wanted one value of at least 0 with a finite reciprocal",
                          checkpoint_.file_of(tensor.name), quoted_name(tensor.name));
      }
      if (scale.front() == 0) {  // of an expert that calibration never saw
        source_bytes_ -= tensor.bytes;
        return {};
      }
      ++activation_scales_;
      add_scalar(*module + std::string(kModelOptInputScale), 1.0f / scale.front(), tensor.bytes);
      return {};
    }
    for (const std::string_view made : {kTensorScale, kModelOptInputScale}) {
      if (with_packed(made)) {
        return user_error(
            "{}: tensor {}: its matrix is of compressed-tensors, and would get one of that name",
            checkpoint_.file_of(tensor.name), quoted_name(tensor.name));
      }
    }
    if (const auto module = module_of(tensor.name, ".weight"); module && tensor.shape.size() == 2)
      unquantized_.push_back(*module);
    add_copy(tensor, tensor.name);
    return {};
  }

  Status add_matrix(const std::string& module, const TensorInfo& codes) {
    if (codes.shape.size() != 2) {
      return user_error("{}: tensor {}: wanted two dimensions, found {}", checkpoint_.file_of(codes.name),
                        quoted_name(codes.name), format_shape(codes.shape));
    }
    const std::optional<int64_t> k = checked_mul(codes.shape[1], 2);
    // The reader of models checks shapes and scales, and has the tensor scale as it computes with it.
    NIBBLE_ASSIGN_OR_RETURN(const Matrix matrix, checkpoint_.matrix(module, codes.shape[0], k.value_or(-1)));
    if (matrix.format != MatrixFormat::kNvfp4) {
      return user_error("{}: tensor {}: {} of compressed-tensors has no layout of ModelOpt's",
                        checkpoint_.file_of(codes.name), quoted_name(codes.name),
                        matrix_format_name(matrix.format));
    }
    ++kept_;
    add_copy(codes, module + ".weight");
    add_scalar(module + std::string(kTensorScale), matrix.tensor_scale, 0);
    return {};
  }

  void add_copy(const TensorInfo& source, const std::string& name) {
    TensorInfo target = source;
    target.name = name;
    shards_.add({std::move(target)},
                {[&](const WriteTensor& write, const std::function<void(int64_t)>& read) {
                  return copy_tensor(checkpoint_, source, 0, write, read);
                }},
                source.bytes);
  }

  void add_scalar(const std::string& name, float value, int64_t source_bytes) {
    shards_.add({{.name = name, .dtype = DType::kF32, .shape = {}, .bytes = sizeof(float)}},
                {[value, source_bytes](const WriteTensor& write, const std::function<void(int64_t)>& read) {
                  read(source_bytes);
                  return write(0, 0, std::as_bytes(std::span(&value, 1)));
                }},
                source_bytes);
  }

  Checkpoint& checkpoint_;
  ShardBuilder shards_;
  std::vector<std::string> unquantized_;
  int64_t kept_ = 0, activation_scales_ = 0, source_bytes_ = 0;
};

}  // namespace

Result<ConvertSummary> convert_compressed_tensors(const FileSystem& files, const ConvertOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(Json config, read_config(files, options.source));
  NIBBLE_RETURN_IF_ERROR(check_apart(options.source, options.destination));
  NIBBLE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(files, options.source));
  const uint64_t headers = hash_tensors(checkpoint.tensors(), hash_text(json_text(config)));
  Converter converter(options, checkpoint);
  NIBBLE_RETURN_IF_ERROR(converter.add_all());
  for (Json* object : {&config, config.contains("text_config") ? &config["text_config"] : nullptr}) {
    if (object == nullptr || !object->is_object()) continue;
    object->erase("quantization_config");
    object->erase("compression_config");
  }
  config["quantization_config"] =
      modelopt_config(converter.unquantized_modules(), converter.has_activation_scales());

  ConvertSummary summary = {.kept = converter.kept(), .source_bytes = converter.source_bytes()};
  CheckpointJob job;
  job = {.destination = options.destination,
         .identity = {{"--type", "none"},
                      {"--max-shard-size", std::to_string(options.max_shard_bytes)},
                      {"source", canonical_path(options.source)},
                      {"source headers", fmt::format("{:016x}", headers)},
                      {"version", options.version}},
         .shards = std::move(converter).shards(),
         .write_other_files = [&](const std::string& to) -> Status {
           NIBBLE_RETURN_IF_ERROR(copy_model_files(files, options.source, to));
           NIBBLE_RETURN_IF_ERROR(replace_text(join_path(to, "config.json"), json_text(config)));
           NIBBLE_RETURN_IF_ERROR(
               replace_text(join_path(to, "hf_quant_config.json"),
                            json_text(hf_quant_config(config["quantization_config"], options.version))));
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
