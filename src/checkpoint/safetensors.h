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

// Reads and checks the header of `file`: every dtype known, at most 8 dims, every product without overflow,
// bytes = elements x size, no key twice, data tiled exactly, nothing beyond the end. Allocates no more than
// the header's size times a small constant. Does not read the data.
Result<SafetensorsHeader> read_safetensors_header(const File& file);

// A name out of a file, as messages show it: in quotes, control characters escaped (a message is one line),
// shortened where it is very long.
std::string quoted_name(std::string_view name);

}  // namespace nibble
