// Element types of tensors on disk and in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace nibble {

enum class DType {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kF64,
  kI8,
  kU8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kBool
};

// Name as safetensors spells it ("BF16", "F8_E4M3", ...).
std::string_view dtype_name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);
int64_t dtype_bytes(DType dtype);

}  // namespace nibble
