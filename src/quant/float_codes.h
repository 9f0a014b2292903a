// Small floating-point codes, one element at a time: the only place that knows their bits.
//   bf16, f16  IEEE-style, decode exact, encode round-to-nearest-even
//   e2m1       4 bits: sign, 2 exponent, 1 mantissa (OCP MX v1.0 5.3.3); values 0 .5 1 1.5 2 3 4 6
//   e4m3       float8_e4m3fn: bias 7, no infinity, max 448, 0x7F and 0xFF are NaN (OCP FP8 v1.0)
//   e8m0       one byte, 2^(b-127), 0xFF is NaN (OCP MX v1.0 5.4.1)
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

namespace nibble {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  uint32_t exponent = (bits >> 10) & 0x1Fu, mantissa = bits & 0x3FFu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact in float32
  return sign != 0 ? -magnitude : magnitude;
}

uint16_t float_to_f16(float value);

// e2m1 codes 0..15 (bit 3 is the sign) to float.
inline float e2m1_to_float(uint8_t code) {
  constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return kValues[code & 15u];
}
// Nearest, ties to the even code, saturating at 6; NaN becomes 6 with its sign. Without a branch, so that a
// loop over it becomes vectors.
inline uint8_t float_to_e2m1(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const float a = std::bit_cast<float>(bits & 0x7FFFFFFFu);
  // The number of midpoints between neighbours that a is beyond; a tie goes to the even code.
  const int code =
      !(a <= 0.25f) + !(a < 0.75f) + !(a <= 1.25f) + !(a < 1.75f) + !(a <= 2.5f) + !(a < 3.5f) + !(a <= 5.0f);
  return static_cast<uint8_t>(static_cast<uint32_t>(code) | ((bits >> 28) & 8u));
}

inline float e4m3_to_float(uint8_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  uint32_t exponent = (code >> 3) & 15u, mantissa = code & 7u;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return sign != 0 ? -magnitude : magnitude;
}
inline bool e4m3_is_nan(uint8_t code) { return (code & 0x7Fu) == 0x7Fu; }
// The first NaN of many codes, or nothing; runs at the speed of memory.
std::optional<size_t> find_e4m3_nan(std::span<const uint8_t> codes);
// Nearest, ties to even, saturating at 448; NaN becomes 0x7F with its sign.
uint8_t float_to_e4m3(float value);

inline float e8m0_to_float(uint8_t code) {
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  // 2^-127 is a float32 subnormal.
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

}  // namespace nibble
