// The safetensors container: u64 little-endian header length (at most 100,000,000), JSON header, data.
// Offsets count from the end of the header; the tensors must tile the data without holes or overlap.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "quant/dtype.h"

namespace nibble {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // absolute offset in the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by position in the file
};

// Reads and checks the header of `file`: every dtype known, every product without overflow, bytes =
// elements x size, data tiled exactly, nothing beyond the end. Allocates no more than the header's size times
// a small constant.
Result<SafetensorsHeader> read_safetensors_header(const File& file);

}  // namespace nibble
