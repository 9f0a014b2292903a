#include "checkpoint/job_journal.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/hash.h"
#include "base/json.h"
#include "base/numbers.h"
#include "base/output_file.h"

namespace nibble {
namespace {

constexpr int64_t kMaxJournalBytes = 64 << 20;

using Json = nlohmann::ordered_json;

bool read_shard(const Json& entry, FinishedFile& shard) {
  if (!entry.is_object() || !entry.contains("bytes") || !entry.contains("hash")) return false;
  if (!entry["bytes"].is_number_integer() || !entry["hash"].is_number_unsigned()) return false;
  shard = {entry["bytes"].get<int64_t>(), entry["hash"].get<uint64_t>()};
  return true;
}

}  // namespace

Result<std::optional<JobJournal>> JobJournal::load(const FileSystem& files, const std::string& path) {
  if (!files.exists(path)) return std::optional<JobJournal>();
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_text(files, path, kMaxJournalBytes));
  NIBBLE_ASSIGN_OR_RETURN(const Json json, parse_json(text, path));
  JobJournal journal;
  bool good = json.is_object() && json.contains("job") && json["job"].is_object() &&
              json.contains("shards") && json["shards"].is_object() && json.contains("complete") &&
              json["complete"].is_boolean();
  if (good) {
    for (const auto& [key, value] : json["job"].items()) {
      good = good && value.is_string();
      if (good) journal.job[key] = value.get<std::string>();
    }
    for (const auto& [name, entry] : json["shards"].items())
      good = good && read_shard(entry, journal.shards[name]);
    journal.complete = json["complete"].get<bool>();
  }
  if (!good) return user_error("{}: not the journal of such a run", path);
  return std::optional<JobJournal>(std::move(journal));
}

Status JobJournal::save(const std::string& path) const {
  Json json = {{"job", job}, {"shards", Json::object()}, {"complete", complete}};
  for (const auto& [name, shard] : shards)
    json["shards"][name] = {{"bytes", shard.bytes}, {"hash", shard.hash}};
  return replace_text(path, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

Status JobJournal::check_job(const std::map<std::string, std::string>& wanted,
                             const std::string& path) const {
  for (const auto& [key, value] : wanted) {
    const auto at = job.find(key);
    if (at != job.end() && at->second == value) continue;
    return user_error(
        "{}: begun with {} {}, this run has {}; finish it with the same, or remove that directory", path, key,
        at == job.end() ? "none" : at->second, value);
  }
  return {};
}

Result<FinishedFile> hash_file(const FileSystem& files, const std::string& path, ThreadPool& pool) {
  constexpr int64_t kBlockBytes = 4 << 20;
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, files.open(path));
  const int64_t size = file->size_bytes(), blocks = ceil_div(size, kBlockBytes);
  std::vector<uint64_t> hashes(static_cast<size_t>(blocks));
  std::mutex mutex;
  Status error;  // guarded by mutex
  pool.parallel_for(blocks, [&](int64_t block) {
    std::vector<std::byte> bytes(static_cast<size_t>(std::min(kBlockBytes, size - block * kBlockBytes)));
    Status status = file->read_at(block * kBlockBytes, bytes);
    hashes[static_cast<size_t>(block)] = hash_bytes(bytes);
    const std::lock_guard lock(mutex);
    if (error.ok()) error = status;
  });
  NIBBLE_RETURN_IF_ERROR(error);
  return FinishedFile{size, hash_bytes(std::as_bytes(std::span(hashes)))};
}

}  // namespace nibble
