// The safetensors shards of a new model directory, written so that a killed run can be gone on from.
//
// A job lives in DST/.partial until it is whole: its files, and a journal of the finished shards with sizes
// and hashes, replaced at once after a shard is on the disk. A later run of the same job checks the finished
// shards against the journal and makes the others. At the end the files move up into DST, config.json last,
// so that nothing half-done loads. The same bytes come out for any number of threads, and after any number of
// kills and resumes: the layout of every file is fixed before the first byte is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/checkpoint.h"

namespace nibble {

struct JobProgress {
  int64_t done_bytes = 0;   // of the source; counts what an earlier run did
  int64_t found_bytes = 0;  // of these what an earlier run did
  int64_t total_bytes = 0;
};

// Takes bytes of output tensor `output` (an index into JobShard::tensors) from `offset` on.
using WriteTensor = std::function<Status(size_t output, int64_t offset, std::span<const std::byte> bytes)>;

struct JobShard {
  std::string file_name;
  std::vector<TensorInfo> tensors;  // name, dtype, shape and bytes
  // Each makes a part of them, and calls `read` with the bytes of the source that are done. Called at once
  // from several threads.
  using Unit = std::function<Status(const WriteTensor& write, const std::function<void(int64_t)>& read)>;
  std::vector<Unit> units;
  int64_t source_bytes = 0;
};

struct CheckpointJob {
  std::string destination;
  std::map<std::string, std::string> identity;  // what the bytes depend on: options, source
  std::vector<JobShard> shards;
  // Writes everything else, config.json too, into `directory`. Comes first, since it may fail soon.
  std::function<Status(const std::string& directory)> write_other_files;
  int threads = 1;
  // Called now and then, by one thread at a time.
  std::function<void(const JobProgress&)> progress;
};

// Fills shards with tensors in the order in which they are added.
class ShardBuilder {
 public:
  explicit ShardBuilder(int64_t max_shard_bytes) : max_shard_bytes_(max_shard_bytes) {}

  // Tensors that stay together, and what makes them: units write to them by their index among `tensors`.
  void add(std::vector<TensorInfo> tensors, std::vector<JobShard::Unit> units, int64_t source_bytes);
  // With their names. Nothing may be added any more.
  std::vector<JobShard> finish() &&;

 private:
  int64_t max_shard_bytes_;
  int64_t shard_bytes_ = 0;
  std::vector<JobShard> shards_;
};

// The number of shards that an earlier run has made. An error leaves DST as it was, or with a .partial that a
// later run goes on from.
Result<int64_t> run_checkpoint_job(const CheckpointJob& job);

// Of all tensors.
int64_t output_bytes(const std::vector<JobShard>& shards);

// An error where DST is the source (a file or a directory) or lies inside of it.
Status check_apart(const std::string& source, const std::string& destination);
// model.safetensors, or model-00002-of-00005.safetensors.
std::string shard_file_name(size_t index, size_t count);
// model.safetensors.index.json in `directory`, where there are several shards.
Status write_shard_index(const std::vector<JobShard>& shards, const std::string& directory);
// A hash of names, types, shapes and places of the tensors of a source: the source's part of the identity.
uint64_t hash_tensors(const std::vector<const TensorInfo*>& tensors, uint64_t seed);
// The bytes of `source` as they are, a few megabytes at a time: the work of a JobShard::Unit.
Status copy_tensor(const Checkpoint& checkpoint, const TensorInfo& source, size_t output,
                   const WriteTensor& write, const std::function<void(int64_t)>& read);
// DIRECTORY without its weights, config.json and hidden files, to `to`.
Status copy_model_files(const FileSystem& files, const std::string& directory, const std::string& to);

}  // namespace nibble
