// Primitives in plain C++ with GCC's vector extension, for any machine; and what each primitive means (load_tail
// and store_tail: in vec_four.inc.h). The 16 lanes are four vectors of 4, which SSE2 and NEON have. Included into an
// anonymous namespace.
#pragma once

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Uint4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef int8_t Byte16 __attribute__((vector_size(16)));

// The same, at any address and over bytes of any type.
typedef float Float4Anywhere __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t Int4Anywhere __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t Half4Anywhere __attribute__((vector_size(8), aligned(1), may_alias));
typedef int16_t Short8Anywhere __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t Byte4Anywhere __attribute__((vector_size(4), aligned(1), may_alias));

struct Vec {
  Float4 part[4];
};
struct Ints {
  Int4 part[4];
};

// 16 registers of 4 lanes: 8 for 2 accumulators, 4 for a weight, 4 for an activation.
constexpr int kTileColumns = 2;  // weight rows of a register tile
constexpr int kTileRows = 1;     // activation rows of a register tile
constexpr int kFusedRows = 2;    // up to so many activation rows, weights are decoded in registers only
constexpr int kFixedRows = 4;    // activation rows of a register tile over weights in tiles
constexpr int kElementTileColumns = 2;  // of element_tiles.inc.h
constexpr int kElementTileRows = 2;
constexpr int kElementRows = 16;     // up to so many activation rows go its way
constexpr int kAttendTileHeads = 1;  // of a tile of 4 positions x heads of attend

#include "ops/cpu/vec_four.inc.h"

NIBBLE_INLINE Float4 splat4(float x) { return Float4{x, x, x, x}; }
NIBBLE_INLINE Vec splat(float x) { NIBBLE_EACH_PART(Vec, splat4(x)); }
NIBBLE_INLINE Vec zero() { return splat(0.0f); }
NIBBLE_INLINE Vec load(const float* p) {
  NIBBLE_EACH_PART(Vec, reinterpret_cast<const Float4Anywhere*>(p)[i]);
}
NIBBLE_INLINE void store(float* p, Vec a) {
  Float4Anywhere* parts = reinterpret_cast<Float4Anywhere*>(p);  // auto would drop the alignment
  parts[0] = a.part[0];
  parts[1] = a.part[1];
  parts[2] = a.part[2];
  parts[3] = a.part[3];
}
NIBBLE_INLINE Vec add(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, a.part[i] + b.part[i]); }
NIBBLE_INLINE Vec sub(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, a.part[i] - b.part[i]); }
NIBBLE_INLINE Vec mul(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, a.part[i] * b.part[i]); }
NIBBLE_INLINE Vec div(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, a.part[i] / b.part[i]); }
// a * b + c, rounded once where the machine can, else twice.
NIBBLE_INLINE Vec fma(Vec a, Vec b, Vec c) { NIBBLE_EACH_PART(Vec, a.part[i] * b.part[i] + c.part[i]); }
NIBBLE_INLINE Vec max(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, a.part[i] > b.part[i] ? a.part[i] : b.part[i]); }
// A NaN in `a` stays.
NIBBLE_INLINE Vec at_least(float low, Vec a) { return max(splat(low), a); }
NIBBLE_INLINE Vec at_most(float high, Vec a) {
  NIBBLE_EACH_PART(Vec, splat4(high) < a.part[i] ? splat4(high) : a.part[i]);
}
NIBBLE_INLINE Ints bits(Vec a) { NIBBLE_EACH_PART(Ints, reinterpret_cast<Int4>(a.part[i])); }
NIBBLE_INLINE Vec from_bits(Ints a) { NIBBLE_EACH_PART(Vec, reinterpret_cast<Float4>(a.part[i])); }
NIBBLE_INLINE Int4 splat_int4(int32_t x) { return Int4{x, x, x, x}; }
NIBBLE_INLINE Ints splat_int(int32_t x) { NIBBLE_EACH_PART(Ints, splat_int4(x)); }
// Modulo 2^32.
NIBBLE_INLINE Ints add(Ints a, Ints b) {
  NIBBLE_EACH_PART(
      Ints, reinterpret_cast<Int4>(reinterpret_cast<Uint4>(a.part[i]) + reinterpret_cast<Uint4>(b.part[i])));
}
NIBBLE_INLINE Ints sub(Ints a, Ints b) { NIBBLE_EACH_PART(Ints, a.part[i] - b.part[i]); }
NIBBLE_INLINE Ints bit_and(Ints a, Ints b) { NIBBLE_EACH_PART(Ints, a.part[i] & b.part[i]); }
template <int kBits>
NIBBLE_INLINE Ints shift_left(Ints a) {
  NIBBLE_EACH_PART(Ints, a.part[i] << kBits);
}
// Arithmetic: copies the sign bit.
template <int kBits>
NIBBLE_INLINE Ints shift_right(Ints a) {
  NIBBLE_EACH_PART(Ints, a.part[i] >> kBits);
}

// Lane i + lane i+8, then i + i+4, i + i+2, i + i+1: the same tree everywhere.
NIBBLE_INLINE float sum(Vec a) {
  Float4 low = a.part[0] + a.part[2], high = a.part[1] + a.part[3];
  Float4 four = low + high;
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// p[0..3] = the sums of four vectors.
NIBBLE_INLINE void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
}

// 16 bf16 or f16 to float, exact.
NIBBLE_INLINE Ints load_halves(const uint16_t* p) {
  NIBBLE_EACH_PART(Ints, __builtin_convertvector(reinterpret_cast<const Half4Anywhere*>(p)[i], Int4));
}
NIBBLE_INLINE Vec load_bf16(const uint16_t* p) { return from_bits(shift_left<16>(load_halves(p))); }
NIBBLE_INLINE Vec load_f16(const uint16_t* p) {
  Ints half = load_halves(p);
  Ints magnitude = bit_and(half, splat_int(0x7FFF));
  // The exponent's bias is 112 less than float's; a multiplication repairs it, subnormals included.
  Ints value = bits(mul(from_bits(shift_left<13>(magnitude)), splat(0x1p112f)));
  NIBBLE_EACH_PART(
      Vec, reinterpret_cast<Float4>(value.part[i] | ((half.part[i] & 0x8000) << 16) |
                                    ((magnitude.part[i] >= 0x7C00) & 0x7F800000)));  // infinity and NaN
}

// 16 bytes, sign-extended.
NIBBLE_INLINE Ints load_bytes(const uint8_t* p) {
  NIBBLE_EACH_PART(Ints, __builtin_convertvector(reinterpret_cast<const Byte4Anywhere*>(p)[i], Int4));
}

NIBBLE_INLINE Vec to_float(Ints a) { NIBBLE_EACH_PART(Vec, __builtin_convertvector(a.part[i], Float4)); }
NIBBLE_INLINE void store(int32_t* p, Ints a) {
  for (int i = 0; i < 4; ++i) __builtin_memcpy(p + 4 * i, &a.part[i], sizeof(Int4));
}
// The lowest byte of each lane, those of 8 lanes after those of the 8 before: the even ones, the odd ones.
NIBBLE_INLINE void store_digits(int8_t* p, Ints a) {
  int32_t lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = static_cast<int8_t>(lanes[i] & 255);
}
// 16 e4m3 codes without a sign, as 2^-8 of their values: with the code's bits in place a float16 is that,
// subnormals included.
NIBBLE_INLINE Vec load_scales_e4m3(const uint8_t* p) {
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = static_cast<uint16_t>(p[i] << 7);
  return load_f16(halves);
}
// 64 bytes: lane i is the four bytes of weight row i.
NIBBLE_INLINE Ints load_codes(const uint8_t* p) {
  NIBBLE_EACH_PART(Ints, reinterpret_cast<const Int4Anywhere*>(p)[i]);
}
NIBBLE_INLINE Ints low_nibbles(Ints codes) { return bit_and(codes, splat_int(0x0F0F0F0F)); }
// Of each nibble (a byte below 16) twice the e2m1 number, or the two's complement number, plus 12.
NIBBLE_INLINE Int4 e2m1_part(Byte16 nibbles) {
  const Byte16 m = nibbles & 7;  // 0 1 2 3 4 5 6 7 are 0 1 2 3 4 6 8 12
  const Byte16 magnitude = m - (m > 4) - (m > 5) - (m > 6) * 3;
  const Byte16 negative = reinterpret_cast<Byte16>(nibbles > 7);
  return reinterpret_cast<Int4>(12 + ((magnitude ^ negative) - negative));
}
NIBBLE_INLINE Ints e2m1_bytes(Ints nibbles) {
  NIBBLE_EACH_PART(Ints, e2m1_part(reinterpret_cast<Byte16>(nibbles.part[i])));
}
NIBBLE_INLINE Ints int4_bytes(Ints nibbles) {
  NIBBLE_EACH_PART(Ints, reinterpret_cast<Int4>((reinterpret_cast<Byte16>(nibbles.part[i]) ^ 8) + 4));
}
// sums + products of the bytes of w (below 25) with digits: byte j of a lane of w[i] times digits[4 * i + j].
NIBBLE_INLINE Int4 dot_part(const Ints (&w)[4], const Short8 (&even)[4], const Short8 (&odd)[4], int part) {
  Short8 pairs = {};  // four sums of two products stay below 2^15
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Int4 bytes = w[i].part[part];
    pairs += reinterpret_cast<Short8>(bytes & 0x00FF00FF) * even[i];
    pairs += reinterpret_cast<Short8>((bytes >> 8) & 0x00FF00FF) * odd[i];
  }
  const Int4 both = reinterpret_cast<Int4>(pairs);
  return ((both << 16) >> 16) + (both >> 16);
}
NIBBLE_INLINE Ints dot(Ints sums, const Ints (&w)[4], const int8_t* digits) {
  // Lane i of these: the digits 4i and 4i + 2, and those after them, in 16 bits each.
  const Short8 all = *reinterpret_cast<const Short8Anywhere*>(digits);
  const Int4 evens = reinterpret_cast<Int4>((all << 8) >> 8), odds = reinterpret_cast<Int4>(all >> 8);
  Short8 even[4], odd[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    even[i] = reinterpret_cast<Short8>(splat_int4(evens[i]));
    odd[i] = reinterpret_cast<Short8>(splat_int4(odds[i]));
  }
  NIBBLE_EACH_PART(Ints, sums.part[i] + dot_part(w, even, odd, i));
}
#undef NIBBLE_EACH_PART
