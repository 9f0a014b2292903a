// Primitives over AVX-512 (F, BW, VL, DQ; VNNI and BF16 where the file is compiled for them): one register is
// a vector of 16 lanes. Included into an anonymous namespace, after <immintrin.h>; what each primitive means
// is said in vec_generic.h.
#pragma once

using Vec = __m512;
using Ints = __m512i;

// 32 registers: 24 accumulators, 4 weights, 1 activation. The fused path decodes in registers as well, which
// takes 2 more for each column.
constexpr int kTileColumns = 4;
constexpr int kTileRows = 6;
constexpr int kFusedRows = 4;
constexpr int kFixedRows = 8;  // activation rows of a register tile over weights in tiles
// 24 accumulators, 3 weights, 1 activation; two registers for decoding.
constexpr int kElementTileColumns = 3;
constexpr int kElementTileRows = 8;
constexpr int kElementRows = 32;
constexpr int kAttendTileHeads = 4;  // 16 accumulators, 4 keys or vectors of values, 1 query or weight

NIBBLE_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

template <class Register>
NIBBLE_INLINE Register in_register(Register a) {
  __asm__("" : "+v"(a));
  return a;
}

NIBBLE_INLINE Vec zero() { return _mm512_setzero_ps(); }
NIBBLE_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
NIBBLE_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
NIBBLE_INLINE Vec load_tail(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
NIBBLE_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
NIBBLE_INLINE void store_tail(float* p, int64_t n, Vec a) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
NIBBLE_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
NIBBLE_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
NIBBLE_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
NIBBLE_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
NIBBLE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
NIBBLE_INLINE Vec at_least(float low, Vec a) { return _mm512_max_ps(splat(low), a); }
NIBBLE_INLINE Vec at_most(float high, Vec a) { return _mm512_min_ps(splat(high), a); }
NIBBLE_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
NIBBLE_INLINE Ints bits(Vec a) { return _mm512_castps_si512(a); }
NIBBLE_INLINE Vec from_bits(Ints a) { return _mm512_castsi512_ps(a); }
NIBBLE_INLINE Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
NIBBLE_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
NIBBLE_INLINE Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
NIBBLE_INLINE Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
// (a & mask) | b
NIBBLE_INLINE Ints and_or(Ints a, Ints mask, Ints b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xEA); }
template <int kBits>
NIBBLE_INLINE Ints shift_left(Ints a) {
  return _mm512_slli_epi32(a, kBits);
}
template <int kBits>
NIBBLE_INLINE Ints shift_right(Ints a) {
  return _mm512_srai_epi32(a, kBits);
}

NIBBLE_INLINE float sum(Vec a) {
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Lane i + lane i + 8 of two vectors, side by side.
NIBBLE_INLINE Vec half_sums(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}
NIBBLE_INLINE void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  Vec ab = half_sums(a, b), cd = half_sums(c, d);
  Vec fours = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  Vec twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x4E));
  Vec ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0xB1));
  const Ints firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  _mm_storeu_ps(p, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, ones)));
}

NIBBLE_INLINE Vec load_bf16(const uint16_t* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
NIBBLE_INLINE Vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

NIBBLE_INLINE Ints load_bytes(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

NIBBLE_INLINE Vec to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
NIBBLE_INLINE void store(int32_t* p, Ints a) { _mm512_storeu_si512(p, a); }
NIBBLE_INLINE void store_digits(int8_t* p, Ints a) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(a), order));
}
NIBBLE_INLINE Vec load_scales_e4m3(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7));
}
NIBBLE_INLINE Ints load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
NIBBLE_INLINE Ints low_nibbles(Ints codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
NIBBLE_INLINE Ints e2m1_bytes(Ints nibbles) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}
NIBBLE_INLINE Ints int4_bytes(Ints nibbles) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 17, 18, 19, 4, 5, 6, 7, 8, 9, 10, 11);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}
NIBBLE_INLINE Ints splat_four(const int8_t* p) {
  int32_t four = 0;
  __builtin_memcpy(&four, p, sizeof(four));
  return _mm512_set1_epi32(four);
}
NIBBLE_INLINE Ints dot(Ints sums, const Ints (&w)[4], const int8_t* digits) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sums = _mm512_dpbusd_epi32(sums, w[i], splat_four(digits + 4 * i));
  return sums;
#else
  // Pairs of products, and four of those, stay below 2^15.
  Ints pairs = _mm512_maddubs_epi16(w[0], splat_four(digits));
#pragma GCC unroll 3
  for (int i = 1; i < 4; ++i)
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(w[i], splat_four(digits + 4 * i)));
  return add(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

#if defined(__AVX512BF16__)
// sums + products of pairs of bfloat16 numbers: lane i gets two of them, the second of the pairs first.
NIBBLE_INLINE Vec dot_pairs(Vec a, Vec b, Vec sums) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
// The low halves of all lanes, then the high ones.
NIBBLE_INLINE Ints side_by_side(Ints a) {
  const Ints order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,  //
                                      30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_permutexvar_epi16(order, a);
}
// To bfloat16, to the nearest; 16 of them in the room of 8 floats.
NIBBLE_INLINE void store_bf16(float* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a)));
}
#endif
