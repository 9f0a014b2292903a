#include "quant/gguf_blocks.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "base/check.h"
#include "quant/float_codes.h"

namespace nibble {
namespace {

constexpr GgufTypeInfo kTypes[] = {
    {0, "F32", 1, 4, true},          {1, "F16", 1, 2, true},          {2, "Q4_0", 32, 18, true},
    {3, "Q4_1", 32, 20, true},       {6, "Q5_0", 32, 22, false},      {7, "Q5_1", 32, 24, false},
    {8, "Q8_0", 32, 34, true},       {9, "Q8_1", 32, 40, false},      {10, "Q2_K", 256, 84, false},
    {11, "Q3_K", 256, 110, false},   {12, "Q4_K", 256, 144, true},    {13, "Q5_K", 256, 176, false},
    {14, "Q6_K", 256, 210, true},    {15, "Q8_K", 256, 292, false},   {16, "IQ2_XXS", 256, 66, false},
    {17, "IQ2_XS", 256, 74, false},  {18, "IQ3_XXS", 256, 98, false}, {19, "IQ1_S", 256, 50, false},
    {20, "IQ4_NL", 32, 18, false},   {21, "IQ3_S", 256, 110, false},  {22, "IQ2_S", 256, 82, false},
    {23, "IQ4_XS", 256, 136, false}, {24, "I8", 1, 1, false},         {25, "I16", 1, 2, false},
    {26, "I32", 1, 4, false},        {27, "I64", 1, 8, false},        {28, "F64", 1, 8, false},
    {29, "IQ1_M", 256, 56, false},   {30, "BF16", 1, 2, true},        {34, "TQ1_0", 256, 54, false},
    {35, "TQ2_0", 256, 66, false},   {39, "MXFP4", 32, 17, true},     {40, "NVFP4", 64, 36, true},
    {41, "Q1_0", 128, 18, false},
};

uint16_t read_u16(const uint8_t* bytes) { return static_cast<uint16_t>(bytes[0] | bytes[1] << 8); }
uint32_t read_u32(const uint8_t* bytes) {
  return read_u16(bytes) | static_cast<uint32_t>(read_u16(bytes + 2)) << 16;
}
float read_f16(const uint8_t* bytes) { return f16_to_float(read_u16(bytes)); }

// The half split of 32 values: byte j holds value j in its low nibble and value j + 16 in its high one.

void q4_0_block(const uint8_t* block, float* out) {
  const float d = read_f16(block);
  const uint8_t* codes = block + 2;
  for (int j = 0; j < 16; ++j) {
    out[j] = d * static_cast<float>((codes[j] & 15) - 8);
    out[j + 16] = d * static_cast<float>((codes[j] >> 4) - 8);
  }
}

void q4_1_block(const uint8_t* block, float* out) {
  const float d = read_f16(block), m = read_f16(block + 2);
  const uint8_t* codes = block + 4;
  for (int j = 0; j < 16; ++j) {
    out[j] = d * static_cast<float>(codes[j] & 15) + m;
    out[j + 16] = d * static_cast<float>(codes[j] >> 4) + m;
  }
}

void mxfp4_block(const uint8_t* block, float* out) {
  const float scale = e8m0_to_float(block[0]);
  const uint8_t* codes = block + 1;
  for (int j = 0; j < 16; ++j) {
    out[j] = scale * e2m1_to_float(codes[j] & 15);
    out[j + 16] = scale * e2m1_to_float(codes[j] >> 4);
  }
}

// A scale of NVFP4 is e4m3 without its sign. Of the codes for NaN, 0x7F stands for 0; 0xFF, which nobody
// writes, is what ggml makes of its bits.
float ue4m3_to_float(uint8_t code) {
  if (code == 0x7F) return 0.0f;
  if (code == 0xFF) return 480.0f;
  return e4m3_to_float(code & 0x7F);
}

// Four groups of 16 values, the half split within each: byte j holds the values j and j + 8.
void nvfp4_block(const uint8_t* block, float* out) {
  for (int group = 0; group < 4; ++group) {
    const float scale = ue4m3_to_float(block[group]);
    const uint8_t* codes = block + 4 + 8 * group;
    for (int j = 0; j < 8; ++j) {
      out[16 * group + j] = scale * e2m1_to_float(codes[j] & 15);
      out[16 * group + j + 8] = scale * e2m1_to_float(codes[j] >> 4);
    }
  }
}

// The half split of `count` values to neighbours in a byte, the even one low.
void join_halves(const uint8_t* halves, int count, uint8_t* out) {
  const int half = count / 2;
  const auto code = [&](int i) { return i < half ? halves[i] & 15 : halves[i - half] >> 4; };
  for (int i = 0; i < half; ++i) out[i] = static_cast<uint8_t>(code(2 * i) | code(2 * i + 1) << 4);
}

void q8_0_block(const uint8_t* block, float* out) {
  const float d = read_f16(block);
  for (int j = 0; j < 32; ++j) out[j] = d * static_cast<float>(static_cast<int8_t>(block[2 + j]));
}

// Twelve bytes hold eight scales and eight mins of 6 bits: the first four of each in the low bits of bytes
// 0-3 and 4-7, the last four as 4 bits each in bytes 8-11 and their two high bits above the first four.
struct ScaleAndMin {
  float scale, min;
};
ScaleAndMin unpack_q4_k(const uint8_t* packed, int j) {
  if (j < 4) return {static_cast<float>(packed[j] & 63), static_cast<float>(packed[j + 4] & 63)};
  return {static_cast<float>((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4),
          static_cast<float>(packed[j + 4] >> 4 | (packed[j] >> 6) << 4)};
}

// Eight sub-blocks of 32 values; each 32 bytes of codes hold two of them, one in the low nibbles.
void q4_k_block(const uint8_t* block, float* out) {
  const float d = read_f16(block), dmin = read_f16(block + 2);
  const uint8_t* packed = block + 4;
  for (int sub = 0; sub < 8; ++sub) {
    const auto [scale, min] = unpack_q4_k(packed, sub);
    const float sub_d = d * scale, sub_min = dmin * min;
    const uint8_t* codes = block + 16 + 32 * (sub / 2);
    const int shift = sub % 2 * 4;
    for (int j = 0; j < 32; ++j)
      out[32 * sub + j] = sub_d * static_cast<float>(codes[j] >> shift & 15) - sub_min;
  }
}

// Two halves of 128 values. Within one, value 32 * part + j has its low four bits in byte j or j + 32 of 64
// (parts 0 and 2, 1 and 3, low nibble first) and its high two bits at 2 * part of byte j of 32.
void q6_k_block(const uint8_t* block, float* out) {
  const uint8_t* scales = block + 192;
  const float d = read_f16(block + 208);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + 64 * half;
    const uint8_t* high = block + 128 + 32 * half;
    for (int part = 0; part < 4; ++part) {
      for (int j = 0; j < 32; ++j) {
        const int low_bits = low[j + part % 2 * 32] >> (part / 2 * 4) & 15;
        const int high_bits = high[j] >> (2 * part) & 3;
        const int at = 128 * half + 32 * part + j;
        const float sub_d = d * static_cast<float>(static_cast<int8_t>(scales[at / 16]));
        out[at] = sub_d * static_cast<float>((low_bits | high_bits << 4) - 32);
      }
    }
  }
}

template <class Block>
void each_block(const GgufTypeInfo& info, const uint8_t* blocks, int64_t k, float* out, Block block) {
  for (int64_t i = 0; i < k / info.block_values; ++i)
    block(blocks + i * info.block_bytes, out + i * info.block_values);
}

}  // namespace

std::span<const GgufTypeInfo> gguf_types() { return kTypes; }

const GgufTypeInfo* find_gguf_type(uint32_t id) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const GgufTypeInfo& info) { return info.id == id; });
  return found == std::end(kTypes) ? nullptr : found;
}

const GgufTypeInfo* find_gguf_type(std::string_view name) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const GgufTypeInfo& info) { return info.name == name; });
  return found == std::end(kTypes) ? nullptr : found;
}

const GgufTypeInfo& gguf_type_info(GgufType type) {
  const GgufTypeInfo* info = find_gguf_type(static_cast<uint32_t>(type));
  NIBBLE_CHECK(info != nullptr && info->readable);
  return *info;
}

void dequantize_gguf_row(GgufType type, const uint8_t* blocks, int64_t k, float* out) {
  const GgufTypeInfo& info = gguf_type_info(type);
  NIBBLE_CHECK(k % info.block_values == 0);
  switch (type) {
    case GgufType::kF32:
      return each_block(info, blocks, k, out, [](const uint8_t* block, float* value) {
        *value = std::bit_cast<float>(read_u32(block));
      });
    case GgufType::kF16:
      return each_block(info, blocks, k, out,
                        [](const uint8_t* block, float* value) { *value = read_f16(block); });
    case GgufType::kBF16:
      return each_block(info, blocks, k, out,
                        [](const uint8_t* block, float* value) { *value = bf16_to_float(read_u16(block)); });
    case GgufType::kQ4_0:
      return each_block(info, blocks, k, out, q4_0_block);
    case GgufType::kQ4_1:
      return each_block(info, blocks, k, out, q4_1_block);
    case GgufType::kQ8_0:
      return each_block(info, blocks, k, out, q8_0_block);
    case GgufType::kQ4_K:
      return each_block(info, blocks, k, out, q4_k_block);
    case GgufType::kQ6_K:
      return each_block(info, blocks, k, out, q6_k_block);
    case GgufType::kMxfp4:
      return each_block(info, blocks, k, out, mxfp4_block);
    case GgufType::kNvfp4:
      return each_block(info, blocks, k, out, nvfp4_block);
  }
  NIBBLE_CHECK(false);
}

std::optional<int64_t> find_bad_gguf_scale(GgufType type, const uint8_t* blocks, int64_t count) {
  const int64_t block_bytes = gguf_type_info(type).block_bytes;
  const auto find = [&](auto is_bad) -> std::optional<int64_t> {
    for (int64_t i = 0; i < count; ++i) {
      if (is_bad(blocks + i * block_bytes)) return i;
    }
    return std::nullopt;
  };
  const auto is_bad_f16 = [](const uint8_t* bytes) { return (bytes[1] & 0x7C) == 0x7C; };
  switch (type) {
    case GgufType::kQ4_0:
    case GgufType::kQ8_0:
      return find(is_bad_f16);
    case GgufType::kQ4_1:
    case GgufType::kQ4_K:
      return find([&](const uint8_t* block) { return is_bad_f16(block) || is_bad_f16(block + 2); });
    case GgufType::kQ6_K:
      return find([&](const uint8_t* block) { return is_bad_f16(block + 208); });
    case GgufType::kMxfp4:
      return find([](const uint8_t* block) { return block[0] == 0xFF; });
    case GgufType::kNvfp4:  // every code has a value
    case GgufType::kF32:
    case GgufType::kF16:
    case GgufType::kBF16:
      return std::nullopt;
  }
  NIBBLE_CHECK(false);
}

bool repack_gguf_nvfp4_row(const uint8_t* blocks, int64_t k, uint8_t* codes, uint8_t* scales) {
  bool all_have_codes = true;
  for (int64_t block = 0; block < k / 64; ++block, blocks += 36) {
    for (int group = 0; group < 4; ++group) {
      const uint8_t scale = blocks[group];
      all_have_codes &= scale != 0xFF;
      // As ue4m3_to_float reads it.
      *scales++ = scale == 0x7F ? 0 : scale & 0x7F;
      join_halves(blocks + 4 + 8 * group, 16, codes);
      codes += 8;
    }
  }
  return all_have_codes;
}
void repack_gguf_mxfp4_row(const uint8_t* blocks, int64_t k, uint8_t* codes, uint8_t* scales) {
  for (int64_t block = 0; block < k / 32; ++block, blocks += 17, codes += 16) {
    *scales++ = blocks[0];
    join_halves(blocks + 1, 32, codes);
  }
}
void repack_gguf_q4_0_row(const uint8_t* blocks, int64_t k, uint8_t* codes, uint8_t* scales_f16) {
  for (int64_t block = 0; block < k / 32; ++block, blocks += 18, codes += 16, scales_f16 += 2) {
    std::memcpy(scales_f16, blocks, 2);
    join_halves(blocks + 2, 32, codes);
    for (int i = 0; i < 16; ++i) codes[i] ^= 0x88;  // q - 8 in two's complement
  }
}

}  // namespace nibble
