#include "quant/dtype.h"

#include <array>

#include "base/check.h"

namespace nibble {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<DTypeRow, 15> kRows = {{{DType::kF32, "F32", 4},
                                             {DType::kF16, "F16", 2},
                                             {DType::kBF16, "BF16", 2},
                                             {DType::kF8E4M3, "F8_E4M3", 1},
                                             {DType::kF8E5M2, "F8_E5M2", 1},
                                             {DType::kF64, "F64", 8},
                                             {DType::kI8, "I8", 1},
                                             {DType::kU8, "U8", 1},
                                             {DType::kI16, "I16", 2},
                                             {DType::kU16, "U16", 2},
                                             {DType::kI32, "I32", 4},
                                             {DType::kU32, "U32", 4},
                                             {DType::kI64, "I64", 8},
                                             {DType::kU64, "U64", 8},
                                             {DType::kBool, "BOOL", 1}}};

const DTypeRow& row(DType dtype) {
  for (const DTypeRow& r : kRows) {
    if (r.dtype == dtype) return r;
  }
  NIBBLE_CHECK(false);
}

}  // namespace

std::string_view dtype_name(DType dtype) { return row(dtype).name; }
int64_t dtype_bytes(DType dtype) { return row(dtype).bytes; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeRow& r : kRows) {
    if (r.name == name) return r.dtype;
  }
  return std::nullopt;
}

}  // namespace nibble
