#include "checkpoint/quantize.h"

#include <map>
#include <utility>

#include "base/hash.h"
#include "base/json.h"
#include "base/output_file.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize_config.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/quantize_tensor.h"

namespace nibble {
namespace {

// What one shard of the plan takes, tensor by tensor.
JobShard job_of(const Checkpoint& checkpoint, const ShardPlan& plan, QuantizeType type) {
  JobShard shard = {.file_name = plan.file_name, .tensors = plan.tensors, .source_bytes = plan.source_bytes};
  for (const QuantizeItem& item : plan.items) {
    for (int64_t slice = 0; slice < item.slices; ++slice) {
      shard.units.emplace_back(
          [&, type, slice](const WriteTensor& write, const std::function<void(int64_t)>& read) {
            return quantize_slice(checkpoint, item, slice, type, write, read);
          });
    }
  }
  return shard;
}

Status write_other_files(const FileSystem& files, const QuantizeOptions& options, const QuantizePlan& plan,
                         nlohmann::ordered_json config, const std::string& to) {
  NIBBLE_RETURN_IF_ERROR(copy_model_files(files, options.source, to));
  config["quantization_config"] = quantization_config(plan);
  NIBBLE_RETURN_IF_ERROR(replace_text(join_path(to, "config.json"), json_text(config)));
  if (plan.type != QuantizeType::kNvfp4) return {};
  return replace_text(join_path(to, "hf_quant_config.json"),
                      json_text(hf_quant_config(config["quantization_config"], options.version)));
}

}  // namespace

std::string_view quantize_type_name(QuantizeType type) {
  switch (type) {
    case QuantizeType::kNvfp4:
      return "nvfp4";
    case QuantizeType::kMxfp4:
      return "mxfp4";
    case QuantizeType::kQ4:
      return "q4";
  }
  NIBBLE_CHECK(false);
}

std::string_view quantize_what_name(QuantizeWhat what) {
  return what == QuantizeWhat::kExperts ? "experts" : "all-linear";
}

Result<QuantizeSummary> quantize_model(const FileSystem& files, const QuantizeOptions& options) {
  NIBBLE_CHECK(options.threads >= 1 && options.max_shard_bytes >= 1);
  const std::string source = canonical_path(options.source);
  NIBBLE_ASSIGN_OR_RETURN(const nlohmann::ordered_json config, read_source_config(files, options.source));
  NIBBLE_RETURN_IF_ERROR(check_apart(options.source, options.destination));
  NIBBLE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(files, options.source));
  NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan, plan_quantization(checkpoint, config, options.type,
                                                                     options.what, options.max_shard_bytes));
  CheckpointJob job;
  job = {.destination = options.destination,
         .identity = {{"--type", std::string(quantize_type_name(options.type))},
                      {"--what", std::string(quantize_what_name(options.what))},
                      {"--max-shard-size", std::to_string(options.max_shard_bytes)},
                      {"source", source},
                      {"source headers", fmt::format("{:016x}", hash_tensors(checkpoint.tensors(),
                                                                             hash_text(json_text(config))))},
                      {"version", options.version}},
         .write_other_files = [&](const std::string& to) -> Status {
           NIBBLE_RETURN_IF_ERROR(write_other_files(files, options, plan, config, to));
           return write_shard_index(job.shards, to);
         },
         .threads = options.threads,
         .progress = options.progress};
  QuantizeSummary summary = {.tensors = plan.quantized,
                             .kept = std::ssize(plan.kept),
                             .source_bytes = plan.source_bytes,
                             .shards = std::ssize(plan.shards)};
  for (const ShardPlan& shard : plan.shards) {
    job.shards.push_back(job_of(checkpoint, shard, options.type));
    for (const TensorInfo& tensor : shard.tensors) summary.output_bytes += tensor.bytes;
  }
  NIBBLE_ASSIGN_OR_RETURN(summary.resumed_shards, run_checkpoint_job(job));
  return summary;
}

}  // namespace nibble
