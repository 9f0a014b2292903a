// A file system for tests: files that live in memory, over another file system or none, and faults by path.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"

namespace nibble {

// Faults apply to files opened after they were asked for. REQUIRES `under`, where given, to outlive it. Not
// safe for a change while another thread opens.
class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(const FileSystem* under = nullptr) : under_(under) {}

  // A file in memory; hides one of the same path below. The directories above it exist by that.
  void add_file(const std::string& path, std::string bytes);
  // As if the file were not there.
  void hide(const std::string& path) { faults_[path].hidden = true; }
  // It is there and opens fail.
  void refuse_open(const std::string& path) { faults_[path].refuses_open = true; }
  // map() gives nothing.
  void refuse_map(const std::string& path) { faults_[path].refuses_map = true; }
  // A read that touches this byte fails, as a bad sector does. Implies refuse_map.
  void fail_read_at(const std::string& path, int64_t offset) { faults_[path].bad_byte = offset; }
  // Reads end at `size_bytes`, though size_bytes() promised more: the file shrank. Implies refuse_map.
  void shrink(const std::string& path, int64_t size_bytes) { faults_[path].shrunk_bytes = size_bytes; }

  Result<std::unique_ptr<File>> open(const std::string& path) const override;
  bool exists(const std::string& path) const override;
  bool is_directory(const std::string& path) const override;
  Result<std::vector<std::string>> list(const std::string& path) const override;

  struct Faults {
    bool hidden = false;
    bool refuses_open = false;
    bool refuses_map = false;
    std::optional<int64_t> bad_byte;
    std::optional<int64_t> shrunk_bytes;
  };

 private:
  Faults faults_of(const std::string& path) const;

  const FileSystem* under_;
  std::map<std::string, std::shared_ptr<const std::string>> memory_;
  std::map<std::string, Faults> faults_;
};

// A file of these bytes by itself.
std::unique_ptr<File> memory_file(const std::string& path, std::string bytes);

}  // namespace nibble
