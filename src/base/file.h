// All file access goes through these two interfaces, so that a test can break any of it (faulty_file.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace nibble {

// A file open for reading. Safe for concurrent read_at calls.
class File {
 public:
  virtual ~File() = default;
  virtual const std::string& path() const = 0;
  virtual int64_t size_bytes() const = 0;
  // Reads exactly out.size() bytes at `offset`, or says how many were there.
  virtual Status read_at(int64_t offset, std::span<std::byte> out) const = 0;
  // The whole file as memory, valid as long as this File lives; empty span where the file cannot be mapped
  // (callers then fall back to read_at). A file that shrinks while mapped is the operator's fault.
  virtual std::span<const std::byte> map() const = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual Result<std::unique_ptr<File>> open(const std::string& path) const = 0;
  virtual bool exists(const std::string& path) const = 0;
  virtual bool is_directory(const std::string& path) const = 0;
  // Names (not paths) in a directory, sorted.
  virtual Result<std::vector<std::string>> list(const std::string& path) const = 0;

  // The real one (POSIX: open, pread, mmap).
  static const FileSystem& posix();
};

// Of those that can be mapped.
std::vector<std::span<const std::byte>> mappings_of(std::span<const std::unique_ptr<File>> files);

// The whole file as text; refuses one of more than `limit_bytes`.
Result<std::string> read_text(const FileSystem& files, const std::string& path, int64_t limit_bytes);

// "a" + "b" -> "a/b"
std::string join_path(const std::string& directory, const std::string& name);

}  // namespace nibble
