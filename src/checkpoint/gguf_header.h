// One GGUF file without its data: magic, version 2 or 3, metadata, and where each tensor lies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/gguf_metadata.h"
#include "quant/gguf_blocks.h"

namespace nibble {

struct GgufTensorInfo {
  std::string name;
  const GgufTypeInfo* type = nullptr;
  // Row-major like every shape in nibble, [N, K] or [E, N, K]: the file's order reversed.
  std::vector<int64_t> shape;
  int64_t begin = 0;  // absolute offset in the file
  int64_t bytes = 0;
};

struct GgufHeader {
  uint32_t version = 0;
  int64_t alignment = 0;
  GgufMetadata metadata;
  std::vector<GgufTensorInfo> tensors;  // by position in the file
};

// Reads and checks everything but the data. Refused: another magic or version, big-endian files, a key or
// tensor that is there twice, names that are empty or very long, unknown value and tensor types, arrays of
// arrays, dims that are 0, more than 4, or overflow, K that is no multiple of the type's block, an alignment
// that is no power of two from 8 to 1 MiB, and data that is unaligned, overlaps, or goes beyond the end. A
// claim that the file is too short for is refused before any room is made for it; all metadata may take 1
// GiB.
Result<GgufHeader> read_gguf_header(const File& file);

}  // namespace nibble
