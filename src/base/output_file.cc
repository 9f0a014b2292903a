#include "base/output_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

namespace nibble {
namespace {

Status failed(const std::string& path, const char* what) {
  return user_error("{}: {} failed: {}", path, what, std::strerror(errno));
}

}  // namespace

Result<std::unique_ptr<OutputFile>> OutputFile::create(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) return user_error("{}: cannot write: {}", path, std::strerror(errno));
  return std::unique_ptr<OutputFile>(new OutputFile(path, descriptor));
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status OutputFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  NIBBLE_CHECK(descriptor_ >= 0);
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed(path_, "writing");
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
  return {};
}

Status OutputFile::sync_and_close() {
  NIBBLE_CHECK(descriptor_ >= 0);
  if (::fsync(descriptor_) != 0) return failed(path_, "writing to the disk");
  if (::close(std::exchange(descriptor_, -1)) != 0) return failed(path_, "closing");
  return {};
}

Status replace_text(const std::string& path, std::string_view text) {
  const std::string fresh = path + ".new";
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<OutputFile> file, OutputFile::create(fresh));
  NIBBLE_RETURN_IF_ERROR(file->write_at(0, std::as_bytes(std::span(text))));
  NIBBLE_RETURN_IF_ERROR(file->sync_and_close());
  NIBBLE_RETURN_IF_ERROR(rename_file(fresh, path));
  return sync_directory(std::filesystem::path(path).parent_path().string());
}

Status make_directories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return user_error("{}: cannot make the directory: {}", path, error.message());
  return {};
}

Status rename_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    return user_error("{}: cannot rename to {}: {}", from, to, std::strerror(errno));
  return {};
}

Status sync_directory(const std::string& path) {
  const int descriptor = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return failed(path, "opening the directory");
  // Some file systems cannot sync a directory (EINVAL); they order renames by themselves or not at all.
  const bool synced = ::fsync(descriptor) == 0 || errno == EINVAL;
  Status status = synced ? Status() : failed(path, "writing to the disk");
  ::close(descriptor);
  return status;
}

Status remove_tree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) return user_error("{}: cannot remove: {}", path, error.message());
  return {};
}

Result<int64_t> free_bytes(const std::string& path) {
  struct statvfs info = {};
  if (::statvfs(path.c_str(), &info) != 0) return failed(path, "asking for the free space");
  const double bytes = static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return bytes >= static_cast<double>(kMax) ? kMax : static_cast<int64_t>(bytes);
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return std::filesystem::equivalent(a, b, error) && !error;
}

std::string canonical_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  std::filesystem::path canonical = std::filesystem::weakly_canonical(absolute, error);
  if (error) return path;
  if (!canonical.has_filename() && canonical.has_relative_path())
    canonical = canonical.parent_path();  // "a/"
  return canonical.string();
}

Result<LockFile> LockFile::acquire(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) return user_error("{}: cannot write: {}", path, std::strerror(errno));
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(descriptor);
    if (error == EWOULDBLOCK) return user_error("{}: another process is at work there", path);
    // A file system without locks: go on without.
    return LockFile(-1);
  }
  return LockFile(descriptor);
}

LockFile::~LockFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace nibble
