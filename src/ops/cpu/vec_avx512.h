// Primitives over AVX-512 (F, BW, VL, DQ): one register is a vector of 16 lanes. Included into an anonymous
// namespace, after <immintrin.h>; what each primitive means is said in vec_generic.h.
#pragma once

using Vec = __m512;
using Ints = __m512i;

// 32 registers: 24 accumulators, 4 weights, 1 activation. The fused path decodes in registers as well, which
// takes 2 more for each column.
constexpr int kTileColumns = 4;
constexpr int kTileRows = 6;
constexpr int kFusedRows = 4;
// 24 accumulators, 3 weights, 1 activation; two registers for decoding.
constexpr int kElementTileColumns = 3;
constexpr int kElementTileRows = 8;
constexpr int kElementRows = 32;
constexpr int kAttendTileHeads = 4;  // 16 accumulators, 4 keys or vectors of values, 1 query or weight

NIBBLE_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

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

NIBBLE_INLINE Ints load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
// vpermps looks at the lowest 4 bits of each lane only, which is the mask that we would need.
NIBBLE_INLINE Vec e2m1(Ints codes) {
  const Vec table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                   -2.0f, -3.0f, -4.0f, -6.0f);
  return _mm512_permutexvar_ps(codes, table);
}
NIBBLE_INLINE Ints load_scale_codes(const uint8_t* p) {
  __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi8_epi32(_mm_unpacklo_epi8(eight, eight));
}

NIBBLE_INLINE Vec int4(Ints codes) {
  const Vec table = _mm512_setr_ps(0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, -8.0f, -7.0f, -6.0f, -5.0f,
                                   -4.0f, -3.0f, -2.0f, -1.0f);
  return _mm512_permutexvar_ps(codes, table);
}
NIBBLE_INLINE Ints load_bytes(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
NIBBLE_INLINE Vec spread_quads(__m128 four) {
  const Ints lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(four));
}
NIBBLE_INLINE Ints load_byte_quads(const uint8_t* p) {
  int32_t four = 0;
  __builtin_memcpy(&four, p, sizeof(four));
  return bits(spread_quads(_mm_castsi128_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)))));
}
NIBBLE_INLINE Vec load_f16_quads(const uint8_t* p) {
  return spread_quads(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
