#include "checkpoint/quantize.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/log.h"
#include "base/numbers.h"
#include "base/output_file.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize_config.h"
#include "checkpoint/quantize_journal.h"
#include "checkpoint/quantize_plan.h"
#include "checkpoint/quantize_tensor.h"
#include "checkpoint/safetensors_writer.h"

namespace nibble {
namespace {

// DST/.partial/{lock, journal.json, files/...}
constexpr const char* kPartial = ".partial";
constexpr const char* kFiles = "files";
constexpr const char* kConfig = "config.json";

std::string to_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// Weights in whatever container, and their indexes: what is not copied.
bool is_weight_file(const std::string& name) {
  constexpr std::array<std::string_view, 10> kEndings = {
      ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".index.json"};
  return std::any_of(kEndings.begin(), kEndings.end(),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

class QuantizeJob {
 public:
  QuantizeJob(const FileSystem& files, const QuantizeOptions& options)
      : files_(files),
        options_(options),
        partial_(join_path(options.destination, kPartial)),
        made_(join_path(partial_, kFiles)),
        journal_path_(join_path(partial_, "journal.json")),
        pool_(options.threads) {}

  Result<QuantizeSummary> run() {
    NIBBLE_RETURN_IF_ERROR(plan());
    NIBBLE_RETURN_IF_ERROR(open_destination());
    Status status = make_all();
    if (!status.ok()) {
      abandon();
      return status;
    }
    NIBBLE_RETURN_IF_ERROR(publish());
    return summary_;
  }

 private:
  // Reads headers and config, decides everything, writes nothing.
  Status plan();
  // DST/.partial, locked, with the journal of this job; in it what the journal vouches for, and nothing else.
  Status open_destination();
  Status check_destination() const;
  // The other files first, since they may fail soon; then the shards, then the journal's word that all is
  // there.
  Status make_all();
  Status remove_unfinished();
  Status check_finished_shards();
  Status check_space() const;
  Status make_shard(const ShardPlan& shard);
  Status copy_files(const std::string& from, const std::string& to, int depth);
  Status write_json_files();
  // From DST/.partial/files up into DST.
  Status publish();
  // What remains of a failed run without one finished shard is not worth going on from.
  void abandon();

  void report(int64_t bytes) {
    const std::lock_guard lock(progress_mutex_);
    done_bytes_ += bytes;
    if (options_.progress) {
      options_.progress(
          {.done_bytes = done_bytes_, .found_bytes = found_bytes_, .total_bytes = plan_.source_bytes});
    }
  }

  const FileSystem& files_;
  const QuantizeOptions& options_;
  const std::string partial_, made_, journal_path_;
  ThreadPool pool_;
  nlohmann::ordered_json config_;
  std::optional<Checkpoint> checkpoint_;
  QuantizePlan plan_;
  std::map<std::string, std::string> job_;
  bool made_destination_ = false;
  std::optional<LockFile> lock_;
  QuantizeJournal journal_;
  std::mutex progress_mutex_;
  int64_t done_bytes_ = 0;  // guarded by progress_mutex_
  int64_t found_bytes_ = 0;
  QuantizeSummary summary_;
};

Status QuantizeJob::plan() {
  const std::string source = canonical_path(options_.source);
  const std::string destination = canonical_path(options_.destination);
  NIBBLE_ASSIGN_OR_RETURN(config_, read_source_config(files_, options_.source));
  if (same_file(options_.source, options_.destination) || source == destination)
    return user_error("{}: source and destination are the same directory", options_.destination);
  if (destination.starts_with(join_path(source, "")))
    return user_error("{}: the destination lies inside of the source", options_.destination);
  NIBBLE_ASSIGN_OR_RETURN(checkpoint_, Checkpoint::open(files_, options_.source));
  NIBBLE_ASSIGN_OR_RETURN(plan_, plan_quantization(*checkpoint_, config_, options_.type, options_.what,
                                                   options_.max_shard_bytes));
  uint64_t headers = hash_text(to_text(config_));
  for (const TensorInfo* tensor : checkpoint_->tensors()) {
    headers = hash_text(fmt::format("{}\n{}{}@{}\n", tensor->name, dtype_name(tensor->dtype),
                                    format_shape(tensor->shape), tensor->begin),
                        headers);
  }
  job_ = {{"--type", std::string(quantize_type_name(options_.type))},
          {"--what", std::string(quantize_what_name(options_.what))},
          {"--max-shard-size", std::to_string(options_.max_shard_bytes)},
          {"source", source},
          {"source headers", fmt::format("{:016x}", headers)},
          {"version", options_.version}};
  summary_ = {.tensors = plan_.quantized,
              .kept = std::ssize(plan_.kept),
              .source_bytes = plan_.source_bytes,
              .shards = std::ssize(plan_.shards)};
  for (const ShardPlan& shard : plan_.shards) {
    for (const TensorInfo& tensor : shard.tensors) summary_.output_bytes += tensor.bytes;
  }
  return {};
}

Status QuantizeJob::check_destination() const {
  const FileSystem& disk = FileSystem::posix();
  if (!disk.exists(options_.destination)) return {};
  if (!disk.is_directory(options_.destination))
    return user_error("{}: is there and is no directory", options_.destination);
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const Names names, disk.list(options_.destination));
  using Journal = std::optional<QuantizeJournal>;
  NIBBLE_ASSIGN_OR_RETURN(const Journal journal, QuantizeJournal::load(disk, journal_path_));
  // Once all was made, files are found in DST because they have moved up already.
  if (journal && journal->complete) return {};
  for (const std::string& name : names) {
    if (name != kPartial && name != "lost+found") {
      return user_error("{}: is not empty: it has {}; wanted a new or an empty directory",
                        options_.destination, quoted_name(name));
    }
  }
  return {};
}

Status QuantizeJob::open_destination() {
  NIBBLE_RETURN_IF_ERROR(check_destination());
  made_destination_ = !FileSystem::posix().exists(options_.destination);
  NIBBLE_RETURN_IF_ERROR(make_directories(made_));
  NIBBLE_ASSIGN_OR_RETURN(LockFile lock, LockFile::acquire(join_path(partial_, "lock")));
  lock_.emplace(std::move(lock));
  using Journal = std::optional<QuantizeJournal>;
  NIBBLE_ASSIGN_OR_RETURN(Journal journal, QuantizeJournal::load(FileSystem::posix(), journal_path_));
  if (journal) {
    journal_ = std::move(*journal);
    return journal_.check_job(job_, partial_);
  }
  journal_.job = job_;
  return {};
}

Status QuantizeJob::make_all() {
  if (journal_.complete) {
    summary_.resumed_shards = summary_.shards;
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(check_finished_shards());
  NIBBLE_RETURN_IF_ERROR(remove_unfinished());
  NIBBLE_RETURN_IF_ERROR(check_space());
  NIBBLE_RETURN_IF_ERROR(journal_.save(journal_path_));
  NIBBLE_RETURN_IF_ERROR(copy_files(options_.source, made_, 0));
  NIBBLE_RETURN_IF_ERROR(write_json_files());
  for (const ShardPlan& shard : plan_.shards) {
    if (journal_.shards.count(shard.file_name) != 0) continue;
    NIBBLE_RETURN_IF_ERROR(make_shard(shard));
  }
  // The last look before it may be taken for whole: as a reader would see it.
  NIBBLE_RETURN_IF_ERROR(Checkpoint::open(FileSystem::posix(), made_).status());
  NIBBLE_RETURN_IF_ERROR(sync_directory(made_));
  journal_.complete = true;
  return journal_.save(journal_path_);
}

// Keeps in the journal what is on the disk as the journal says.
Status QuantizeJob::check_finished_shards() {
  for (const ShardPlan& shard : plan_.shards) {
    const auto at = journal_.shards.find(shard.file_name);
    if (at == journal_.shards.end()) continue;
    const Result<FinishedFile> found =
        hash_file(FileSystem::posix(), join_path(made_, shard.file_name), pool_);
    if (found.ok() && found->bytes == at->second.bytes && found->hash == at->second.hash) {
      ++summary_.resumed_shards;
      found_bytes_ += shard.source_bytes;
      report(shard.source_bytes);
    } else {
      log_warning("{}: {} is not as it was written, and is made again", made_, shard.file_name);
      journal_.shards.erase(at);
    }
  }
  return {};
}

Status QuantizeJob::remove_unfinished() {
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const Names names, FileSystem::posix().list(made_));
  for (const std::string& name : names) {
    if (journal_.shards.count(name) == 0) NIBBLE_RETURN_IF_ERROR(remove_tree(join_path(made_, name)));
  }
  return {};
}

Status QuantizeJob::check_space() const {
  int64_t wanted = 0;
  for (const ShardPlan& shard : plan_.shards) {
    if (journal_.shards.count(shard.file_name) != 0) continue;
    for (const TensorInfo& tensor : shard.tensors) wanted += tensor.bytes;
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t free, free_bytes(partial_));
  if (wanted > free) {
    return user_error("{}: the disk has {} free, and {} are still to be written", options_.destination,
                      format_bytes(free), format_bytes(wanted));
  }
  return {};
}

Status QuantizeJob::make_shard(const ShardPlan& shard) {
  struct Unit {
    const QuantizeItem* item;
    int64_t slice;
  };
  std::vector<Unit> units;
  for (const QuantizeItem& item : shard.items) {
    for (int64_t slice = 0; slice < item.slices; ++slice) units.push_back({&item, slice});
  }
  const std::string path = join_path(made_, shard.file_name);
  NIBBLE_ASSIGN_OR_RETURN(SafetensorsOutput output,
                          SafetensorsOutput::create(path, safetensors_layout(shard.tensors)));
  const WriteTensor write = [&](size_t index, int64_t offset, std::span<const std::byte> bytes) {
    return output.write(index, offset, bytes);
  };
  std::mutex mutex;
  Status error;                                         // guarded by mutex
  std::atomic<int64_t> error_unit = std::ssize(units);  // of several errors the first in the file is told
  pool_.parallel_for(std::ssize(units), [&](int64_t i) {
    if (i > error_unit) return;
    const Unit& unit = units[static_cast<size_t>(i)];
    Status status = quantize_slice(*checkpoint_, *unit.item, unit.slice, options_.type, write,
                                   [&](int64_t bytes) { report(bytes); });
    if (status.ok()) return;
    const std::lock_guard lock(mutex);
    if (i > error_unit) return;
    error = std::move(status);
    error_unit = i;
  });
  NIBBLE_RETURN_IF_ERROR(error);
  NIBBLE_RETURN_IF_ERROR(output.finish());
  NIBBLE_RETURN_IF_ERROR(sync_directory(made_));
  NIBBLE_ASSIGN_OR_RETURN(journal_.shards[shard.file_name], hash_file(FileSystem::posix(), path, pool_));
  return journal_.save(journal_path_);
}

Status QuantizeJob::copy_files(const std::string& from, const std::string& to, int depth) {
  constexpr int kMaxDepth = 8;
  constexpr size_t kChunkBytes = 1 << 20;
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const Names names, files_.list(from));
  for (const std::string& name : names) {
    // Hidden: caches and version control.
    if (name.starts_with('.') || is_weight_file(name) || (depth == 0 && name == kConfig)) continue;
    const std::string source = join_path(from, name), target = join_path(to, name);
    if (files_.is_directory(source)) {
      if (depth == kMaxDepth) return user_error("{}: directories nested too deep", source);
      NIBBLE_RETURN_IF_ERROR(make_directories(target));
      NIBBLE_RETURN_IF_ERROR(copy_files(source, target, depth + 1));
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, files_.open(source));
    NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> copy, OutputFile::create(target));
    std::vector<std::byte> chunk(kChunkBytes);
    for (int64_t done = 0; done < file->size_bytes();) {
      const int64_t size = std::min(std::ssize(chunk), file->size_bytes() - done);
      const std::span<std::byte> bytes = std::span(chunk).first(static_cast<size_t>(size));
      NIBBLE_RETURN_IF_ERROR(file->read_at(done, bytes));
      NIBBLE_RETURN_IF_ERROR(copy->write_at(done, bytes));
      done += size;
    }
    NIBBLE_RETURN_IF_ERROR(copy->sync_and_close());
  }
  return depth == 0 ? Status() : sync_directory(to);
}

Status QuantizeJob::write_json_files() {
  config_["quantization_config"] = quantization_config(plan_);
  NIBBLE_RETURN_IF_ERROR(replace_text(join_path(made_, kConfig), to_text(config_)));
  if (plan_.type == QuantizeType::kNvfp4) {
    NIBBLE_RETURN_IF_ERROR(replace_text(join_path(made_, "hf_quant_config.json"),
                                        to_text(hf_quant_config(plan_, options_.version))));
  }
  if (plan_.shards.size() == 1) return {};
  return replace_text(join_path(made_, "model.safetensors.index.json"), to_text(shard_index(plan_)));
}

Status QuantizeJob::publish() {
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(Names names, FileSystem::posix().list(made_));
  // config.json last: without it no reader takes the directory for a model.
  std::stable_partition(names.begin(), names.end(), [](const std::string& name) { return name != kConfig; });
  for (const std::string& name : names) {
    NIBBLE_RETURN_IF_ERROR(rename_file(join_path(made_, name), join_path(options_.destination, name)));
  }
  NIBBLE_RETURN_IF_ERROR(sync_directory(options_.destination));
  NIBBLE_RETURN_IF_ERROR(remove_tree(partial_));
  return sync_directory(options_.destination);
}

void QuantizeJob::abandon() {
  if (!journal_.shards.empty()) return;
  Status status = remove_tree(made_destination_ ? options_.destination : partial_);
  if (!status.ok()) log_warning("{}", status.message());
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
  return QuantizeJob(files, options).run();
}

}  // namespace nibble
