// The tensor types of GGUF: what a block of each occupies and, for those that nibble reads, what its bytes
// mean. Blocks lie one after the other along K and hold values of one row only.
//
// Every product here is taken in float32 in the order that ggml takes it, so that a row is the same to the
// bit, but for two things that no sum can see or that the format's definition says otherwise: a zero from the
// e2m1 code 8 is -0 (in ggml's table +0), and the e8m0 scale 0xFF is NaN (ggml goes on to 2^128).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace nibble {

enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ6_K = 14,
  kBF16 = 30,
  kMxfp4 = 39,
  kNvfp4 = 40,
};

struct GgufTypeInfo {
  uint32_t id;
  std::string_view name;  // as the gguf package spells it
  int64_t block_values;   // K is a multiple of it
  int64_t block_bytes;
  bool readable;  // a GgufType; the others can be listed, no more
};

// Every type whose block size is known, by id.
std::span<const GgufTypeInfo> gguf_types();
// Null where the id is in no table of ours.
const GgufTypeInfo* find_gguf_type(uint32_t id);
const GgufTypeInfo* find_gguf_type(std::string_view name);
const GgufTypeInfo& gguf_type_info(GgufType type);

// k values of one row. `blocks` needs no alignment. REQUIRES k a multiple of the type's block.
// NVFP4: without the tensor scale, which is a tensor of its own.
void dequantize_gguf_row(GgufType type, const uint8_t* blocks, int64_t k, float* out);

// The first of `count` blocks whose scale is NaN or infinite. Numbers without a scale are not searched.
std::optional<int64_t> find_bad_gguf_scale(GgufType type, const uint8_t* blocks, int64_t count);

// One row of k values of these types with the same codes and scales in the layouts of nvfp4.h, mxfp4.h and
// q4.h: neighbours share a byte, scales lie apart. NVFP4's scale 0xFF, which is 480, has no code there: 0x7F
// (NaN) stands for it, and the answer is false.
bool repack_gguf_nvfp4_row(const uint8_t* blocks, int64_t k, uint8_t* codes, uint8_t* scales);
void repack_gguf_mxfp4_row(const uint8_t* blocks, int64_t k, uint8_t* codes, uint8_t* scales);
void repack_gguf_q4_0_row(const uint8_t* blocks, int64_t k, uint8_t* codes, uint8_t* scales_f16);

}  // namespace nibble
