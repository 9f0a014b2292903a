// The device's side of quant/: a run of kColumns weights of one row as float32, code * block scale, without
// the tensor scale. Every value has the bits that MatrixFormatInfo::decode gives on the host.
#pragma once

#include <cstdint>

#include "ops/cuda/device_matrix.h"

namespace nibble::cuda {

__device__ inline float e2m1_value(uint32_t code) {
  // Exponent and mantissa at the place that float32 has for them; the product moves the bias, exactly.
  const float magnitude = __uint_as_float((code & 7u) << 22) * 0x1p126f;
  return __uint_as_float(__float_as_uint(magnitude) | (code & 8u) << 28);
}
__device__ inline float e4m3_value(uint32_t code) {
  const float magnitude =
      (code & 0x7Fu) == 0x7Fu ? __int_as_float(0x7FC00000) : __uint_as_float((code & 0x7Fu) << 20) * 0x1p120f;
  return __uint_as_float(__float_as_uint(magnitude) | (code & 0x80u) << 24);
}
__device__ inline float e8m0_value(uint32_t code) {
  if (code == 255) return __int_as_float(0x7FC00000);
  return __uint_as_float(code == 0 ? 0x00400000u : code << 23);
}
__device__ inline float bf16_value(uint32_t code) { return __uint_as_float(code << 16); }
__device__ inline float f16_value(uint32_t code) {
  const uint32_t sign = (code & 0x8000u) << 16, bits = (code & 0x7FFFu) << 13;
  if ((code & 0x7C00u) == 0x7C00u) return __uint_as_float(sign | 0x7F800000u | bits);
  return __uint_as_float(__float_as_uint(__uint_as_float(bits) * 0x1p112f) | sign);
}
// A GGUF block may start at any address.
__device__ inline float f16_at(const uint8_t* bytes) { return f16_value(bytes[0] | bytes[1] << 8); }

// The bytes of a run, in one load where they are all there and aligned. Behind `count` bytes stands zero.
template <int kBytes>
struct Bytes {
  uint32_t words[kBytes / 4];

  __device__ void load(const uint8_t* at, int64_t count) {
    if (count >= kBytes && reinterpret_cast<uintptr_t>(at) % kBytes == 0) {
      if constexpr (kBytes == 16) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(at));
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
      } else {
        static_assert(kBytes == 8);
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(at));
        words[0] = two.x, words[1] = two.y;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) words[i] = 0;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (i < count) words[i / 4] |= static_cast<uint32_t>(at[i]) << (8 * (i % 4));
    }
  }
};

// Decoder<F>::run(codes, scales, column, columns, out): the weights from `column`, a multiple of kColumns, of
// a row of `columns`; those behind the row are zero.
template <MatrixFormat kFormat>
struct Decoder;

template <>
struct Decoder<MatrixFormat::kF32> {
  static constexpr int kColumns = 4;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t columns,
                             float* out) {
    Bytes<16> bytes;
    bytes.load(codes + 4 * column, 4 * (columns - column));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = __uint_as_float(bytes.words[i]);
  }
};

template <float (*kValue)(uint32_t)>
struct HalfDecoder {
  static constexpr int kColumns = 8;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t columns,
                             float* out) {
    Bytes<16> bytes;
    bytes.load(codes + 2 * column, 2 * (columns - column));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = kValue(bytes.words[i / 2] >> (16 * (i % 2)) & 0xFFFFu);
  }
};
template <>
struct Decoder<MatrixFormat::kF16> : HalfDecoder<f16_value> {};
template <>
struct Decoder<MatrixFormat::kBF16> : HalfDecoder<bf16_value> {};

// Of the formats below K is a multiple of 16 (or more), so that a run is never cut.
template <>
struct Decoder<MatrixFormat::kNvfp4> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t* scales, int64_t column, int64_t,
                             float* out) {
    Bytes<8> bytes;
    bytes.load(codes + column / 2, 8);
    const float scale = e4m3_value(__ldg(scales + column / 16));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = e2m1_value(bytes.words[i / 8] >> (4 * (i % 8))) * scale;
  }
};
template <>
struct Decoder<MatrixFormat::kMxfp4> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t* scales, int64_t column, int64_t,
                             float* out) {
    Bytes<8> bytes;
    bytes.load(codes + column / 2, 8);
    const float scale = e8m0_value(__ldg(scales + column / 32));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = e2m1_value(bytes.words[i / 8] >> (4 * (i % 8))) * scale;
  }
};
template <>
struct Decoder<MatrixFormat::kQ4> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t* scales, int64_t column, int64_t,
                             float* out) {
    Bytes<8> bytes;
    bytes.load(codes + column / 2, 8);
    const float scale = f16_value(__ldg(reinterpret_cast<const uint16_t*>(scales) + column / 32));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const auto code = static_cast<int>((bytes.words[i / 8] >> (4 * (i % 8)) & 15u) ^ 8u) - 8;
      out[i] = static_cast<float>(code) * scale;
    }
  }
};

template <>
struct Decoder<MatrixFormat::kF8E4M3> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t columns,
                             float* out) {
    Bytes<16> bytes;
    bytes.load(codes + column, columns - column);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = e4m3_value(bytes.words[i / 4] >> (8 * (i % 4)) & 0xFFu);
  }
};
template <>
struct Decoder<MatrixFormat::kFp8Block> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t* scales, int64_t column, int64_t columns,
                             float* out) {
    Decoder<MatrixFormat::kF8E4M3>::run(codes, scales, column, columns, out);
    const float scale = __ldg(reinterpret_cast<const float*>(scales) + column / 128);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] *= scale;
  }
};

// GGUF: half a block of 32 (a quarter of 64, a sixteenth of 256) at a time, byte by byte.
template <>
struct Decoder<MatrixFormat::kGgufQ4_0> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t, float* out) {
    const uint8_t* block = codes + column / 32 * 18;
    const float d = f16_at(block);
    const int shift = column % 32 == 0 ? 0 : 4;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = d * static_cast<float>((block[2 + i] >> shift & 15) - 8);
  }
};
template <>
struct Decoder<MatrixFormat::kGgufQ4_1> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t, float* out) {
    const uint8_t* block = codes + column / 32 * 20;
    const float d = f16_at(block), m = f16_at(block + 2);
    const int shift = column % 32 == 0 ? 0 : 4;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = d * static_cast<float>(block[4 + i] >> shift & 15) + m;
  }
};
template <>
struct Decoder<MatrixFormat::kGgufQ8_0> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t, float* out) {
    const uint8_t* block = codes + column / 32 * 34;
    const float d = f16_at(block);
    const uint8_t* values = block + 2 + column % 32;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(values[i]));
  }
};
template <>
struct Decoder<MatrixFormat::kGgufMxfp4> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t, float* out) {
    const uint8_t* block = codes + column / 32 * 17;
    const float scale = e8m0_value(block[0]);
    const int shift = column % 32 == 0 ? 0 : 4;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = scale * e2m1_value(block[1 + i] >> shift);
  }
};
template <>
struct Decoder<MatrixFormat::kGgufNvfp4> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t, float* out) {
    const uint8_t* block = codes + column / 64 * 36;
    const auto group = static_cast<int>(column % 64 / 16);
    const uint32_t code = block[group];
    // The two codes of NaN as gguf_blocks.cc reads them.
    const float scale = code == 0x7F ? 0.0f : code == 0xFF ? 480.0f : e4m3_value(code & 0x7F);
    const uint8_t* packed = block + 4 + 8 * group;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = scale * e2m1_value(packed[i % 8] >> (i < 8 ? 0 : 4));
  }
};
template <>
struct Decoder<MatrixFormat::kGgufQ4K> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t, float* out) {
    const uint8_t* block = codes + column / 256 * 144;
    const auto in = static_cast<int>(column % 256), sub = in / 32;
    const uint8_t* packed = block + 4;
    const int scale = sub < 4 ? packed[sub] & 63 : (packed[sub + 4] & 15) | (packed[sub - 4] >> 6) << 4;
    const int min = sub < 4 ? packed[sub + 4] & 63 : packed[sub + 4] >> 4 | (packed[sub] >> 6) << 4;
    const float sub_d = f16_at(block) * static_cast<float>(scale);
    const float sub_min = f16_at(block + 2) * static_cast<float>(min);
    const uint8_t* nibbles = block + 16 + 32 * (sub / 2) + in % 32;
    const int shift = sub % 2 * 4;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      out[i] = sub_d * static_cast<float>(nibbles[i] >> shift & 15) - sub_min;
  }
};
template <>
struct Decoder<MatrixFormat::kGgufQ6K> {
  static constexpr int kColumns = 16;
  __device__ static void run(const uint8_t* codes, const uint8_t*, int64_t column, int64_t, float* out) {
    const uint8_t* block = codes + column / 256 * 210;
    const auto in = static_cast<int>(column % 256);
    const int half = in / 128, part = in % 128 / 32, at = in % 32;
    const uint8_t* low = block + 64 * half + part % 2 * 32 + at;
    const uint8_t* high = block + 128 + 32 * half + at;
    const float sub_d = f16_at(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + in / 16]));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int low_bits = low[i] >> (part / 2 * 4) & 15, high_bits = high[i] >> (2 * part) & 3;
      out[i] = sub_d * static_cast<float>((low_bits | high_bits << 4) - 32);
    }
  }
};

// The codes and block scales of row n.
__device__ inline const uint8_t* code_row(const DeviceMatrix& m, int64_t n) {
  return m.codes + n * m.code_row_bytes;
}
__device__ inline const uint8_t* scale_row(const DeviceMatrix& m, int64_t n) {
  return m.scales + n / m.scale_rows * m.scale_row_bytes;
}

// launch.template operator()<format>() for the format that is not known at compile time.
template <class Launch>
void with_format(MatrixFormat format, Launch launch) {
  using enum MatrixFormat;
  switch (format) {
    case kF32:
      return launch.template operator()<kF32>();
    case kF16:
      return launch.template operator()<kF16>();
    case kBF16:
      return launch.template operator()<kBF16>();
    case kNvfp4:
      return launch.template operator()<kNvfp4>();
    case kMxfp4:
      return launch.template operator()<kMxfp4>();
    case kQ4:
      return launch.template operator()<kQ4>();
    case kF8E4M3:
      return launch.template operator()<kF8E4M3>();
    case kFp8Block:
      return launch.template operator()<kFp8Block>();
    case kGgufQ4_0:
      return launch.template operator()<kGgufQ4_0>();
    case kGgufQ4_1:
      return launch.template operator()<kGgufQ4_1>();
    case kGgufQ8_0:
      return launch.template operator()<kGgufQ8_0>();
    case kGgufQ4K:
      return launch.template operator()<kGgufQ4K>();
    case kGgufQ6K:
      return launch.template operator()<kGgufQ6K>();
    case kGgufMxfp4:
      return launch.template operator()<kGgufMxfp4>();
    case kGgufNvfp4:
      return launch.template operator()<kGgufNvfp4>();
  }
}

}  // namespace nibble::cuda
