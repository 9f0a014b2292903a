// What a job has finished so far: DST/.partial/journal.json. Replaced at once after each step, so
// that it is never torn and never ahead of the disk.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/file.h"
#include "base/result.h"
#include "base/thread_pool.h"

namespace nibble {

struct FinishedFile {
  int64_t bytes = 0;
  uint64_t hash = 0;  // of hash_file
};

struct JobJournal {
  std::map<std::string, std::string> job;      // what the bytes depend on: options, source
  std::map<std::string, FinishedFile> shards;  // by file name, all on the disk
  bool complete = false;                       // everything is on the disk, and may have begun to move up

  // Nothing where there is no file. A file that is no journal is an error.
  static Result<std::optional<JobJournal>> load(const FileSystem& files, const std::string& path);
  Status save(const std::string& path) const;

  // An error that names the first difference, where this journal is of another job.
  Status check_job(const std::map<std::string, std::string>& wanted, const std::string& path) const;
};

// Size and hash of a file, read in parallel.
Result<FinishedFile> hash_file(const FileSystem& files, const std::string& path, ThreadPool& pool);

}  // namespace nibble
