// Writing the safetensors container (safetensors.h), one file at a time: the layout first, then the data in
// any order and from any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/output_file.h"
#include "base/result.h"
#include "checkpoint/safetensors.h"

namespace nibble {

// Where the tensors of one file lie, and its first bytes up to the data.
struct SafetensorsLayout {
  std::string head;                 // length and JSON header, a multiple of 8 bytes
  std::vector<TensorInfo> tensors;  // as given, with `begin` and `bytes` filled in
  int64_t file_bytes = 0;
};

// Lays out tensors of which name, dtype and shape are given. In the file they are ordered by element size,
// largest first and otherwise as given, so that each is aligned to its elements without holes. REQUIRES
// shapes whose bytes fit into int64.
SafetensorsLayout safetensors_layout(std::vector<TensorInfo> tensors);

// One file in the making. Safe for concurrent write calls on ranges that do not overlap.
class SafetensorsOutput {
 public:
  // Creates the file with its header.
  static Result<SafetensorsOutput> create(const std::string& path, SafetensorsLayout layout);

  // Writes bytes of tensor `index` (into the vector given to safetensors_layout) from `offset` on. REQUIRES
  // them to lie inside it.
  Status write(size_t index, int64_t offset, std::span<const std::byte> bytes);
  // Returns when the file is on the disk. The caller has written every byte.
  Status finish() { return file_->sync_and_close(); }

 private:
  SafetensorsOutput(std::unique_ptr<OutputFile> file, SafetensorsLayout layout)
      : file_(std::move(file)), layout_(std::move(layout)) {}

  std::unique_ptr<OutputFile> file_;
  SafetensorsLayout layout_;
};

}  // namespace nibble
