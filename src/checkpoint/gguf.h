// The tensors and metadata of a model in GGUF: one file, or parts NAME-00001-of-00003.gguf ... of which the
// first is named and carries the metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/gguf_header.h"
#include "checkpoint/gguf_metadata.h"
#include "quant/gguf_blocks.h"

namespace nibble {

// A tensor's bytes in memory: mapped, or read into a buffer of the Gguf's. Aligned to at least 8 bytes.
struct GgufTensorView {
  const GgufTensorInfo* info = nullptr;
  std::span<const std::byte> bytes;

  GgufType type() const { return static_cast<GgufType>(info->type->id); }
};

// Owns the files and what was read of them; views are valid as long as it lives. Not safe for concurrent use
// while loading.
class Gguf {
 public:
  // Opens `path` and the other parts of it, and checks the parts against each other: number and count of
  // each, the number of all tensors, no tensor in two parts.
  static Result<Gguf> open(const FileSystem& files, const std::string& path);

  const GgufMetadata& metadata() const { return headers_.front().metadata; }
  uint32_t version() const { return headers_.front().version; }
  const std::string& path() const { return files_.front()->path(); }

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  const GgufTensorInfo* info(const std::string& name) const;  // null where there is none
  std::vector<const GgufTensorInfo*> tensors() const;         // by name
  int64_t total_bytes() const;

  // The tensor with exactly this shape and one of these types (none: any that nibble reads); marks it as
  // used. A missing tensor, another type, and another shape are errors that name the file, the tensor, what
  // was wanted and what is there. A second call returns the same bytes.
  Result<GgufTensorView> tensor(const std::string& name, std::span<const int64_t> shape,
                                std::initializer_list<GgufType> types = {});
  // The same, dequantized. NaN or infinity in it is an error.
  Result<std::vector<float>> floats(const std::string& name, std::span<const int64_t> shape);

  std::vector<std::span<const std::byte>> mappings() const { return mappings_of(files_); }
  // Marks a tensor as known but not needed.
  void ignore(const std::string& name);
  // What nobody asked for, by name.
  std::vector<std::string> unused() const;
  // The file that holds a tensor, for messages; the first part where no file holds it.
  const std::string& file_of(const std::string& name) const;

 private:
  struct Entry {
    const GgufTensorInfo* info = nullptr;  // in headers_
    size_t file = 0;                       // index into files_
    bool used = false;
    std::unique_ptr<std::byte[]> copy;  // where the file cannot be mapped
  };

  Status add_file(const FileSystem& files, const std::string& path);
  Status add_parts(const FileSystem& files);
  Status check_part(size_t number, int64_t count, int64_t tensors) const;
  Status index_tensors();
  Result<std::span<const std::byte>> bytes_of(Entry& entry);
  // "FILE: tensor 'NAME': ..."
  Status tensor_error(const std::string& name, const std::string& what) const;

  std::vector<std::unique_ptr<File>> files_;
  std::vector<GgufHeader> headers_;  // one for each file
  std::map<std::string, Entry> tensors_;
};

}  // namespace nibble
