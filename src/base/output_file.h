// Files that are written: every failure (a full disk above all) is a Status that names the file, and what was
// finished is on the disk. Reading goes through file.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

// A file open for writing, from empty. Safe for concurrent write_at calls on ranges that do not overlap.
class OutputFile {
 public:
  // Creates the file, or empties the one that is there.
  static Result<std::unique_ptr<OutputFile>> create(const std::string& path);
  // Closes without a sync; what was written may or may not be on the disk.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& path() const { return path_; }
  Status write_at(int64_t offset, std::span<const std::byte> bytes);
  // Returns when everything is on the disk; the only way that a late write error is seen.
  Status sync_and_close();

 private:
  OutputFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::string path_;
  int descriptor_;  // -1: closed
};

// Replaces the file at once: whoever reads `path`, after a crash too, finds the old text or the new one.
Status replace_text(const std::string& path, std::string_view text);

// The directory and all above it; no error where they are there.
Status make_directories(const std::string& path);
// On the same file system; replaces `to`.
Status rename_file(const std::string& from, const std::string& to);
// Makes creations, renames and removals in a directory last.
Status sync_directory(const std::string& path);
// A file, or a directory with all that is in it; no error where there is none.
Status remove_tree(const std::string& path);
// What an ordinary user may still write on the file system of `path`.
Result<int64_t> free_bytes(const std::string& path);
// Whether both paths lead to one file or directory; false where one of them is not there.
bool same_file(const std::string& a, const std::string& b);
// Absolute, without links, dots and a slash at the end; links as far as the path exists.
std::string canonical_path(const std::string& path);

// A lock that ends with its holder, also by kill -9.
class LockFile {
 public:
  // Creates `path` and locks it; an error that says so where another process holds it.
  static Result<LockFile> acquire(const std::string& path);
  LockFile(LockFile&& other) noexcept : descriptor_(other.descriptor_) { other.descriptor_ = -1; }
  LockFile& operator=(LockFile&&) = delete;
  ~LockFile();

 private:
  explicit LockFile(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

}  // namespace nibble
