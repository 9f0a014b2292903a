#include "base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace nibble {
namespace {

class PosixFile final : public File {
 public:
  PosixFile(std::string path, int descriptor, int64_t size_bytes)
      : path_(std::move(path)), descriptor_(descriptor), size_bytes_(size_bytes) {
    if (size_bytes_ == 0) return;
    void* address = ::mmap(nullptr, static_cast<size_t>(size_bytes_), PROT_READ, MAP_SHARED, descriptor_, 0);
    if (address != MAP_FAILED)
      mapping_ = {static_cast<const std::byte*>(address), static_cast<size_t>(size_bytes_)};
  }
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;
  ~PosixFile() override {
    if (!mapping_.empty()) ::munmap(const_cast<std::byte*>(mapping_.data()), mapping_.size());
    ::close(descriptor_);
  }

  const std::string& path() const override { return path_; }
  int64_t size_bytes() const override { return size_bytes_; }

  Status read_at(int64_t offset, std::span<std::byte> out) const override {
    size_t done = 0;
    while (done < out.size()) {
      ssize_t got =
          ::pread(descriptor_, out.data() + done, out.size() - done, offset + static_cast<int64_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0)
        return user_error("{}: reading at byte {} failed: {}", path_, offset, std::strerror(errno));
      if (got == 0) {
        return user_error("{}: wanted {} bytes at byte {}, but the file ends after {} of them", path_,
                          out.size(), offset, done);
      }
      done += static_cast<size_t>(got);
    }
    return {};
  }

  std::span<const std::byte> map() const override { return mapping_; }

 private:
  std::string path_;
  int descriptor_;
  int64_t size_bytes_;
  std::span<const std::byte> mapping_;
};

class PosixFileSystem final : public FileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path) const override {
    int descriptor =
        ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // NONBLOCK: a FIFO must not hang us
    if (descriptor < 0) return user_error("{}: cannot open: {}", path, std::strerror(errno));
    struct stat info = {};
    if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
      ::close(descriptor);
      return user_error("{}: not a regular file", path);
    }
    return std::unique_ptr<File>(std::make_unique<PosixFile>(path, descriptor, info.st_size));
  }

  bool exists(const std::string& path) const override { return ::access(path.c_str(), F_OK) == 0; }

  bool is_directory(const std::string& path) const override {
    struct stat info = {};
    return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  }

  Result<std::vector<std::string>> list(const std::string& path) const override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) return user_error("{}: cannot list: {}", path, std::strerror(errno));
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(directory)) {
      std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(std::move(name));
    }
    ::closedir(directory);
    std::sort(names.begin(), names.end());
    return names;
  }
};

}  // namespace

const FileSystem& FileSystem::posix() {
  static const PosixFileSystem file_system;
  return file_system;
}

std::vector<std::span<const std::byte>> mappings_of(std::span<const std::unique_ptr<File>> files) {
  std::vector<std::span<const std::byte>> all;
  for (const std::unique_ptr<File>& file : files) {
    if (const std::span<const std::byte> mapping = file->map(); !mapping.empty()) all.push_back(mapping);
  }
  return all;
}

Result<std::string> read_text(const FileSystem& files, const std::string& path, int64_t limit_bytes) {
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, files.open(path));
  if (file->size_bytes() > limit_bytes) {
    return user_error("{}: {} bytes, more than the {} that such a file may have", path, file->size_bytes(),
                      limit_bytes);
  }
  std::string text(static_cast<size_t>(file->size_bytes()), '\0');
  NIBBLE_RETURN_IF_ERROR(file->read_at(0, std::as_writable_bytes(std::span(text))));
  return text;
}

std::string join_path(const std::string& directory, const std::string& name) {
  return directory.empty() || directory.back() == '/' ? directory + name : directory + "/" + name;
}

}  // namespace nibble
