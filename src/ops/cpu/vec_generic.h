// Primitives in plain C++ with GCC's vector extension, for any machine; and what each primitive means. The
// 16 lanes are four vectors of 4, which SSE2 and NEON have. Included into an anonymous namespace.
#pragma once

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

// The same, at any address and over bytes of any type.
typedef float Float4Anywhere __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t Int4Anywhere __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t Half4Anywhere __attribute__((vector_size(8), aligned(1), may_alias));
typedef int8_t Byte4Anywhere __attribute__((vector_size(4), aligned(1), may_alias));

struct Vec {
  Float4 part[4];
};
struct Ints {
  Int4 part[4];
};

// 16 registers of 4 lanes: 8 for 2 accumulators, 4 for a weight, 4 for an activation.
constexpr int kTileColumns = 2;         // weight rows of a register tile
constexpr int kTileRows = 1;            // activation rows of a register tile
constexpr int kElementTileColumns = 2;  // of element_tiles.inc.h
constexpr int kElementTileRows = 2;
constexpr int kElementRows = 16;     // up to so many activation rows go its way
constexpr int kAttendTileHeads = 1;  // of a tile of 4 positions x heads of attend
constexpr int kFusedRows = 2;        // up to so many activation rows, weights are decoded in registers only

// A new vector of type T whose part i is `expression`. A call for each part, not a loop: GCC keeps the parts
// in registers only if it sees constant indices before it takes structs apart.
// NOLINTBEGIN(bugprone-macro-parentheses): T is a type.
#define NIBBLE_EACH_PART(T, expression)                                          \
  auto part_ = [&](int i) __attribute__((always_inline)) { return expression; }; \
  return T {                                                                     \
    { part_(0), part_(1), part_(2), part_(3) }                                   \
  }
// NOLINTEND(bugprone-macro-parentheses)

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
// The first n < 16 lanes; the others are zero, and memory past p + n is not touched.
NIBBLE_INLINE Vec load_tail(const float* p, int64_t n) {
  float padded[16] = {};
  __builtin_memcpy(padded, p, static_cast<uint64_t>(n) * sizeof(float));
  return load(padded);
}
NIBBLE_INLINE void store_tail(float* p, int64_t n, Vec a) {
  float all[16];
  store(all, a);
  __builtin_memcpy(p, all, static_cast<uint64_t>(n) * sizeof(float));
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
NIBBLE_INLINE Ints add(Ints a, Ints b) { NIBBLE_EACH_PART(Ints, a.part[i] + b.part[i]); }
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

// 64 bytes of e2m1 codes: lane i holds the columns 8i .. 8i+7, the lowest 4 bits first.
NIBBLE_INLINE Ints load_codes(const uint8_t* p) {
  NIBBLE_EACH_PART(Ints, reinterpret_cast<const Int4Anywhere*>(p)[i]);
}
// The value of the lowest 4 bits of each lane; the others are ignored. A code is sign, two bits of exponent
// with bias 1, one of mantissa: in place with the exponent moved by 126 all but 0 and 0.5 are right.
NIBBLE_INLINE Vec e2m1(Ints codes) {
  NIBBLE_EACH_PART(
      Vec, reinterpret_cast<Float4>(((codes.part[i] & 8) << 28) |
                                    ((codes.part[i] & 6) == 0 ? -(codes.part[i] & 1) & 0x3F000000
                                                              : ((codes.part[i] & 7) << 22) + (126 << 23))));
}
// 8 bytes, sign-extended: byte b in the lanes 2b and 2b+1.
NIBBLE_INLINE Int4 scale_pair(const uint8_t* p) {
  const int32_t first = (p[0] ^ 0x80) - 0x80, second = (p[1] ^ 0x80) - 0x80;  // sign-extended
  return Int4{first, first, second, second};
}
NIBBLE_INLINE Ints load_scale_codes(const uint8_t* p) { NIBBLE_EACH_PART(Ints, scale_pair(p + 2 * i)); }
// The lowest 4 bits of each lane as a two's complement integer; the others are ignored.
NIBBLE_INLINE Vec int4(Ints codes) {
  NIBBLE_EACH_PART(Vec, __builtin_convertvector((codes.part[i] << 28) >> 28, Float4));
}
// 16 bytes, sign-extended.
NIBBLE_INLINE Ints load_bytes(const uint8_t* p) {
  NIBBLE_EACH_PART(Ints, __builtin_convertvector(reinterpret_cast<const Byte4Anywhere*>(p)[i], Int4));
}
// 4 bytes, zero-extended: byte b in the lanes 4b .. 4b+3.
NIBBLE_INLINE Ints load_byte_quads(const uint8_t* p) { NIBBLE_EACH_PART(Ints, splat_int4(p[i])); }
// 4 f16 at any address: number b in the lanes 4b .. 4b+3.
NIBBLE_INLINE Vec load_f16_quads(const uint8_t* p) {
  uint16_t four[4], all[16];
  __builtin_memcpy(four, p, sizeof(four));
  for (int i = 0; i < 16; ++i) all[i] = four[i / 4];
  return load_f16(all);
}
#undef NIBBLE_EACH_PART
