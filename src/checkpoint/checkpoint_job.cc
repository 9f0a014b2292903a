#include "checkpoint/checkpoint_job.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/numbers.h"
#include "base/output_file.h"
#include "base/thread_pool.h"
#include "checkpoint/job_journal.h"
#include "checkpoint/safetensors_writer.h"

namespace nibble {
namespace {

// DST/.partial/{lock, journal.json, files/...}
constexpr const char* kPartial = ".partial";
constexpr const char* kFiles = "files";
constexpr const char* kConfig = "config.json";

// Weights in whatever container, and their indexes: what is not copied.
bool is_weight_file(const std::string& name) {
  constexpr std::array<std::string_view, 10> kEndings = {
      ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".index.json"};
  return std::any_of(kEndings.begin(), kEndings.end(),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

class JobRunner {
 public:
  explicit JobRunner(const CheckpointJob& job)
      : job_(job),
        partial_(join_path(job.destination, kPartial)),
        made_(join_path(partial_, kFiles)),
        journal_path_(join_path(partial_, "journal.json")),
        pool_(job.threads) {
    for (const JobShard& shard : job.shards) total_bytes_ += shard.source_bytes;
  }

  Result<int64_t> run() {
    NIBBLE_RETURN_IF_ERROR(open_destination());
    Status status = make_all();
    if (!status.ok()) {
      abandon();
      return status;
    }
    NIBBLE_RETURN_IF_ERROR(publish());
    return resumed_;
  }

 private:
  // DST/.partial, locked, with the journal of this job; in it what the journal vouches for, and nothing else.
  Status open_destination();
  Status check_destination() const;
  // The other files, the shards, then the journal's word that all is there.
  Status make_all();
  Status remove_unfinished();
  Status check_finished_shards();
  Status check_space() const;
  Status make_shard(const JobShard& shard);
  // From DST/.partial/files up into DST.
  Status publish();
  // What remains of a failed run without one finished shard is not worth going on from.
  void abandon();

  void report(int64_t bytes) {
    const std::lock_guard lock(progress_mutex_);
    done_bytes_ += bytes;
    if (job_.progress) {
      job_.progress({.done_bytes = done_bytes_, .found_bytes = found_bytes_, .total_bytes = total_bytes_});
    }
  }

  const CheckpointJob& job_;
  const std::string partial_, made_, journal_path_;
  ThreadPool pool_;
  bool made_destination_ = false;
  std::optional<LockFile> lock_;
  JobJournal journal_;
  std::mutex progress_mutex_;
  int64_t done_bytes_ = 0;  // guarded by progress_mutex_
  int64_t found_bytes_ = 0, total_bytes_ = 0, resumed_ = 0;
};

Status JobRunner::check_destination() const {
  const FileSystem& disk = FileSystem::posix();
  if (!disk.exists(job_.destination)) return {};
  if (!disk.is_directory(job_.destination))
    return user_error("{}: is there and is no directory", job_.destination);
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const Names names, disk.list(job_.destination));
  using Journal = std::optional<JobJournal>;
  NIBBLE_ASSIGN_OR_RETURN(const Journal journal, JobJournal::load(disk, journal_path_));
  // Once all was made, files are found in DST because they have moved up already.
  if (journal && journal->complete) return {};
  for (const std::string& name : names) {
    if (name != kPartial && name != "lost+found") {
      return user_error("{}: is not empty: it has {}; wanted a new or an empty directory", job_.destination,
                        quoted_name(name));
    }
  }
  return {};
}

Status JobRunner::open_destination() {
  NIBBLE_RETURN_IF_ERROR(check_destination());
  made_destination_ = !FileSystem::posix().exists(job_.destination);
  NIBBLE_RETURN_IF_ERROR(make_directories(made_));
  NIBBLE_ASSIGN_OR_RETURN(LockFile lock, LockFile::acquire(join_path(partial_, "lock")));
  lock_.emplace(std::move(lock));
  using Journal = std::optional<JobJournal>;
  NIBBLE_ASSIGN_OR_RETURN(Journal journal, JobJournal::load(FileSystem::posix(), journal_path_));
  if (journal) {
    journal_ = std::move(*journal);
    return journal_.check_job(job_.identity, partial_);
  }
  journal_.job = job_.identity;
  return {};
}

Status JobRunner::make_all() {
  if (journal_.complete) {
    resumed_ = std::ssize(job_.shards);
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(check_finished_shards());
  NIBBLE_RETURN_IF_ERROR(remove_unfinished());
  NIBBLE_RETURN_IF_ERROR(check_space());
  NIBBLE_RETURN_IF_ERROR(journal_.save(journal_path_));
  NIBBLE_RETURN_IF_ERROR(job_.write_other_files(made_));
  for (const JobShard& shard : job_.shards) {
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
Status JobRunner::check_finished_shards() {
  for (const JobShard& shard : job_.shards) {
    const auto at = journal_.shards.find(shard.file_name);
    if (at == journal_.shards.end()) continue;
    const Result<FinishedFile> found =
        hash_file(FileSystem::posix(), join_path(made_, shard.file_name), pool_);
    if (found.ok() && found->bytes == at->second.bytes && found->hash == at->second.hash) {
      ++resumed_;
      found_bytes_ += shard.source_bytes;
      report(shard.source_bytes);
    } else {
      log_warning("{}: {} is not as it was written, and is made again", made_, shard.file_name);
      journal_.shards.erase(at);
    }
  }
  return {};
}

Status JobRunner::remove_unfinished() {
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const Names names, FileSystem::posix().list(made_));
  for (const std::string& name : names) {
    if (journal_.shards.count(name) == 0) NIBBLE_RETURN_IF_ERROR(remove_tree(join_path(made_, name)));
  }
  return {};
}

Status JobRunner::check_space() const {
  int64_t wanted = 0;
  for (const JobShard& shard : job_.shards) {
    if (journal_.shards.count(shard.file_name) != 0) continue;
    for (const TensorInfo& tensor : shard.tensors) wanted += tensor.bytes;
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t free, free_bytes(partial_));
  if (wanted > free) {
    return user_error("{}: the disk has {} free, and {} are still to be written", job_.destination,
                      format_bytes(free), format_bytes(wanted));
  }
  return {};
}

Status JobRunner::make_shard(const JobShard& shard) {
  const std::string path = join_path(made_, shard.file_name);
  NIBBLE_ASSIGN_OR_RETURN(SafetensorsOutput output,
                          SafetensorsOutput::create(path, safetensors_layout(shard.tensors)));
  const WriteTensor write = [&](size_t index, int64_t offset, std::span<const std::byte> bytes) {
    return output.write(index, offset, bytes);
  };
  std::mutex mutex;
  Status error;  // guarded by mutex
  std::atomic<int64_t> error_unit =
      std::ssize(shard.units);  // of several errors the first in the file is told
  pool_.parallel_for(std::ssize(shard.units), [&](int64_t i) {
    if (i > error_unit) return;
    Status status = shard.units[static_cast<size_t>(i)](write, [&](int64_t bytes) { report(bytes); });
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

Status JobRunner::publish() {
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(Names names, FileSystem::posix().list(made_));
  // config.json last: without it no reader takes the directory for a model.
  std::stable_partition(names.begin(), names.end(), [](const std::string& name) { return name != kConfig; });
  for (const std::string& name : names) {
    NIBBLE_RETURN_IF_ERROR(rename_file(join_path(made_, name), join_path(job_.destination, name)));
  }
  NIBBLE_RETURN_IF_ERROR(sync_directory(job_.destination));
  NIBBLE_RETURN_IF_ERROR(remove_tree(partial_));
  return sync_directory(job_.destination);
}

void JobRunner::abandon() {
  if (!journal_.shards.empty()) return;
  Status status = remove_tree(made_destination_ ? job_.destination : partial_);
  if (!status.ok()) log_warning("{}", status.message());
}

Status copy_files(const FileSystem& files, const std::string& from, const std::string& to, int depth) {
  constexpr int kMaxDepth = 8;
  constexpr size_t kChunkBytes = 1 << 20;
  using Names = std::vector<std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const Names names, files.list(from));
  for (const std::string& name : names) {
    // Hidden: caches and version control.
    if (name.starts_with('.') || is_weight_file(name) || (depth == 0 && name == kConfig)) continue;
    const std::string source = join_path(from, name), target = join_path(to, name);
    if (files.is_directory(source)) {
      if (depth == kMaxDepth) return user_error("{}: directories nested too deep", source);
      NIBBLE_RETURN_IF_ERROR(make_directories(target));
      NIBBLE_RETURN_IF_ERROR(copy_files(files, source, target, depth + 1));
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, files.open(source));
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

}  // namespace

void ShardBuilder::add(std::vector<TensorInfo> tensors, std::vector<JobShard::Unit> units,
                       int64_t source_bytes) {
  int64_t bytes = 0;
  for (const TensorInfo& tensor : tensors) bytes += tensor.bytes;
  if (shards_.empty() || (shard_bytes_ > 0 && shard_bytes_ + bytes > max_shard_bytes_)) {
    shards_.emplace_back();
    shard_bytes_ = 0;
  }
  JobShard& shard = shards_.back();
  shard_bytes_ += bytes;
  shard.source_bytes += source_bytes;
  const size_t first = shard.tensors.size();
  std::move(tensors.begin(), tensors.end(), std::back_inserter(shard.tensors));
  for (JobShard::Unit& unit : units) {
    shard.units.emplace_back(
        [first, unit = std::move(unit)](const WriteTensor& write, const std::function<void(int64_t)>& read) {
          return unit([&](size_t output, int64_t offset,
                          std::span<const std::byte> part) { return write(first + output, offset, part); },
                      read);
        });
  }
}

std::vector<JobShard> ShardBuilder::finish() && {
  for (size_t i = 0; i < shards_.size(); ++i) shards_[i].file_name = shard_file_name(i, shards_.size());
  return std::move(shards_);
}

int64_t output_bytes(const std::vector<JobShard>& shards) {
  int64_t bytes = 0;
  for (const JobShard& shard : shards) {
    for (const TensorInfo& tensor : shard.tensors) bytes += tensor.bytes;
  }
  return bytes;
}

Result<int64_t> run_checkpoint_job(const CheckpointJob& job) {
  NIBBLE_CHECK(job.threads >= 1);
  return JobRunner(job).run();
}

Status check_apart(const std::string& source, const std::string& destination) {
  // An unset variable of a script, and no name for the directory that one stands in.
  if (destination.empty()) return user_error("destination '': wanted a directory");
  const std::string from = canonical_path(source), to = canonical_path(destination);
  if (same_file(source, destination) || from == to)
    return user_error("{}: source and destination are the same directory", destination);
  if (to.starts_with(join_path(from, "")))
    return user_error("{}: the destination lies inside of the source", destination);
  return {};
}

std::string shard_file_name(size_t index, size_t count) {
  return count == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

Status write_shard_index(const std::vector<JobShard>& shards, const std::string& directory) {
  if (shards.size() == 1) return {};
  int64_t total_bytes = 0;
  std::map<std::string, std::string> weight_map;
  for (const JobShard& shard : shards) {
    for (const TensorInfo& tensor : shard.tensors) {
      total_bytes += tensor.bytes;
      weight_map[tensor.name] = shard.file_name;
    }
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes}}},
                                        {"weight_map", weight_map}};
  return replace_text(join_path(directory, "model.safetensors.index.json"), json_text(index));
}

uint64_t hash_tensors(const std::vector<const TensorInfo*>& tensors, uint64_t seed) {
  for (const TensorInfo* tensor : tensors) {
    seed = hash_text(fmt::format("{}\n{}{}@{}\n", tensor->name, dtype_name(tensor->dtype),
                                 format_shape(tensor->shape), tensor->begin),
                     seed);
  }
  return seed;
}

Status copy_tensor(const Checkpoint& checkpoint, const TensorInfo& source, size_t output,
                   const WriteTensor& write, const std::function<void(int64_t)>& read) {
  constexpr int64_t kChunkBytes = 4 << 20;
  std::vector<std::byte> chunk(static_cast<size_t>(std::min(kChunkBytes, source.bytes)));
  for (int64_t done = 0; done < source.bytes;) {
    const int64_t size = std::min(std::ssize(chunk), source.bytes - done);
    const std::span<std::byte> bytes = std::span(chunk).first(static_cast<size_t>(size));
    NIBBLE_RETURN_IF_ERROR(checkpoint.read_at(source, done, bytes));
    NIBBLE_RETURN_IF_ERROR(write(output, done, bytes));
    done += size;
    read(size);
  }
  return {};
}

Status copy_model_files(const FileSystem& files, const std::string& directory, const std::string& to) {
  return copy_files(files, directory, to, 0);
}

}  // namespace nibble
