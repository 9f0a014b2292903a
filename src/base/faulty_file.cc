#include "base/faulty_file.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace nibble {
namespace {

class MemoryFile final : public File {
 public:
  MemoryFile(std::string path, std::shared_ptr<const std::string> bytes)
      : path_(std::move(path)), bytes_(std::move(bytes)) {}

  const std::string& path() const override { return path_; }
  int64_t size_bytes() const override { return std::ssize(*bytes_); }
  Status read_at(int64_t offset, std::span<std::byte> out) const override {
    const int64_t there = std::max<int64_t>(size_bytes() - offset, 0);
    if (offset < 0 || there < std::ssize(out)) {
      return user_error("{}: wanted {} bytes at byte {}, but the file ends after {} of them", path_,
                        out.size(), offset, there);
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_->data() + offset, out.size());
    return {};
  }
  std::span<const std::byte> map() const override { return std::as_bytes(std::span(*bytes_)); }

 private:
  std::string path_;
  std::shared_ptr<const std::string> bytes_;
};

class FaultyFile final : public File {
 public:
  FaultyFile(std::unique_ptr<File> under, FaultyFileSystem::Faults faults)
      : under_(std::move(under)), faults_(faults) {}

  const std::string& path() const override { return under_->path(); }
  int64_t size_bytes() const override { return under_->size_bytes(); }
  Status read_at(int64_t offset, std::span<std::byte> out) const override {
    const int64_t end = offset + std::ssize(out);
    if (faults_.bad_byte && *faults_.bad_byte >= offset && *faults_.bad_byte < end)
      return user_error("{}: reading at byte {} failed: Input/output error", path(), offset);
    if (faults_.shrunk_bytes && end > *faults_.shrunk_bytes) {
      return user_error("{}: wanted {} bytes at byte {}, but the file ends after {} of them", path(),
                        out.size(), offset, std::max<int64_t>(*faults_.shrunk_bytes - offset, 0));
    }
    return under_->read_at(offset, out);
  }
  std::span<const std::byte> map() const override {
    if (faults_.refuses_map || faults_.bad_byte || faults_.shrunk_bytes) return {};
    return under_->map();
  }

 private:
  std::unique_ptr<File> under_;
  FaultyFileSystem::Faults faults_;
};

std::string with_slash(const std::string& directory) { return join_path(directory, ""); }

}  // namespace

std::unique_ptr<File> memory_file(const std::string& path, std::string bytes) {
  return std::make_unique<MemoryFile>(path, std::make_shared<const std::string>(std::move(bytes)));
}

void FaultyFileSystem::add_file(const std::string& path, std::string bytes) {
  memory_[path] = std::make_shared<const std::string>(std::move(bytes));
}

FaultyFileSystem::Faults FaultyFileSystem::faults_of(const std::string& path) const {
  auto at = faults_.find(path);
  return at == faults_.end() ? Faults{} : at->second;
}

Result<std::unique_ptr<File>> FaultyFileSystem::open(const std::string& path) const {
  if (!exists(path)) return user_error("{}: cannot open: No such file or directory", path);
  const Faults faults = faults_of(path);
  if (faults.refuses_open) return user_error("{}: cannot open: Permission denied", path);
  std::unique_ptr<File> file;
  if (auto at = memory_.find(path); at != memory_.end()) {
    file = std::make_unique<MemoryFile>(path, at->second);
  } else if (under_ != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(file, under_->open(path));
  } else {
    return user_error("{}: not a regular file", path);
  }
  return std::unique_ptr<File>(std::make_unique<FaultyFile>(std::move(file), faults));
}

bool FaultyFileSystem::exists(const std::string& path) const {
  if (faults_of(path).hidden) return false;
  return memory_.count(path) != 0 || is_directory(path) || (under_ != nullptr && under_->exists(path));
}

bool FaultyFileSystem::is_directory(const std::string& path) const {
  if (faults_of(path).hidden) return false;
  auto at = memory_.lower_bound(with_slash(path));
  const bool in_memory = at != memory_.end() && at->first.starts_with(with_slash(path));
  return in_memory || (under_ != nullptr && under_->is_directory(path));
}

Result<std::vector<std::string>> FaultyFileSystem::list(const std::string& path) const {
  if (!is_directory(path)) return user_error("{}: cannot list: Not a directory", path);
  std::set<std::string> names;
  const std::string prefix = with_slash(path);
  for (auto at = memory_.lower_bound(prefix); at != memory_.end() && at->first.starts_with(prefix); ++at)
    names.insert(at->first.substr(prefix.size(), at->first.find('/', prefix.size()) - prefix.size()));
  if (under_ != nullptr && under_->is_directory(path)) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> below, under_->list(path));
    names.insert(below.begin(), below.end());
  }
  std::erase_if(names, [&](const std::string& name) { return faults_of(join_path(path, name)).hidden; });
  return std::vector<std::string>(names.begin(), names.end());
}

}  // namespace nibble
