// Primitives over AVX2, FMA and F16C: a vector of 16 lanes is two registers. Included into an anonymous
// namespace, after <immintrin.h>; what each primitive means is said in vec_generic.h.
#pragma once

struct Vec {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};

// 16 registers: 12 for 2 x 3 accumulators, 2 for a weight, 2 for an activation.
constexpr int kTileColumns = 2;
constexpr int kTileRows = 3;
constexpr int kFusedRows = 3;
constexpr int kFixedRows = 4;
constexpr int kElementTileColumns = 2;
constexpr int kElementTileRows = 3;
constexpr int kElementRows = 16;
constexpr int kAttendTileHeads = 1;

// The lanes below n of eight.
NIBBLE_INLINE __m256i first_lanes(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(n)), lane);
}

NIBBLE_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
NIBBLE_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
NIBBLE_INLINE Vec in_register(Vec a) { return a; }
NIBBLE_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
NIBBLE_INLINE Vec load_tail(const float* p, int64_t n) {
  // p + 8 may lie past the end of the array, so it is only formed where it does not.
  if (n <= 8) return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_setzero_ps()};
  return {_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
NIBBLE_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
NIBBLE_INLINE void store_tail(float* p, int64_t n, Vec a) {
  _mm256_maskstore_ps(p, first_lanes(n), a.low);
  if (n > 8) _mm256_maskstore_ps(p + 8, first_lanes(n - 8), a.high);
}
NIBBLE_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
NIBBLE_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
NIBBLE_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
NIBBLE_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
NIBBLE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
NIBBLE_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
NIBBLE_INLINE Vec at_least(float low, Vec a) { return max(splat(low), a); }
NIBBLE_INLINE Vec at_most(float high, Vec a) {
  return {_mm256_min_ps(_mm256_set1_ps(high), a.low), _mm256_min_ps(_mm256_set1_ps(high), a.high)};
}
NIBBLE_INLINE Ints bits(Vec a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
NIBBLE_INLINE Vec from_bits(Ints a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
NIBBLE_INLINE Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
NIBBLE_INLINE Ints add(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
NIBBLE_INLINE Ints sub(Ints a, Ints b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
NIBBLE_INLINE Ints bit_and(Ints a, Ints b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
template <int kBits>
NIBBLE_INLINE Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.low, kBits), _mm256_slli_epi32(a.high, kBits)};
}
template <int kBits>
NIBBLE_INLINE Ints shift_right(Ints a) {
  return {_mm256_srai_epi32(a.low, kBits), _mm256_srai_epi32(a.high, kBits)};
}

NIBBLE_INLINE float sum(Vec a) {
  __m256 eight = _mm256_add_ps(a.low, a.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

NIBBLE_INLINE __m128 four_sums(Vec a) {
  __m256 eight = _mm256_add_ps(a.low, a.high);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
// The lanes (0 + 2, 0 + 2, 1 + 3, 1 + 3) of two.
NIBBLE_INLINE __m128 pair_sums(__m128 a, __m128 b) {
  return _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
}
NIBBLE_INLINE void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  __m128 ab = pair_sums(four_sums(a), four_sums(b)), cd = pair_sums(four_sums(c), four_sums(d));
  _mm_storeu_ps(p, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}

NIBBLE_INLINE __m128i load_halves(const uint16_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
NIBBLE_INLINE Vec load_bf16(const uint16_t* p) {
  return from_bits(
      shift_left<16>(Ints{_mm256_cvtepu16_epi32(load_halves(p)), _mm256_cvtepu16_epi32(load_halves(p + 8))}));
}
NIBBLE_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_halves(p)), _mm256_cvtph_ps(load_halves(p + 8))};
}

NIBBLE_INLINE Ints load_bytes(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}

NIBBLE_INLINE Vec to_float(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
NIBBLE_INLINE void store(int32_t* p, Ints a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.high);
}
NIBBLE_INLINE void store_digits(int8_t* p, Ints a) {
  // The lowest bytes of four lanes in the lowest of a half register: even lanes, odd lanes.
  const __m256i order = _mm256_setr_epi8(0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                         -1, -1, 0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  auto eight = [&](__m256i lanes) __attribute__((always_inline)) {
    const __m256i bytes = _mm256_shuffle_epi8(lanes, order);
    return _mm_or_si128(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  };
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi64(eight(a.low), eight(a.high)));
}
NIBBLE_INLINE Vec load_scales_e4m3(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
NIBBLE_INLINE Ints load_codes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
NIBBLE_INLINE Ints low_nibbles(Ints codes) { return bit_and(codes, splat_int(0x0F0F0F0F)); }
NIBBLE_INLINE Ints e2m1_bytes(Ints nibbles) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return {_mm256_shuffle_epi8(table, nibbles.low), _mm256_shuffle_epi8(table, nibbles.high)};
}
NIBBLE_INLINE Ints int4_bytes(Ints nibbles) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 17, 18, 19, 4, 5, 6, 7, 8, 9, 10, 11));
  return {_mm256_shuffle_epi8(table, nibbles.low), _mm256_shuffle_epi8(table, nibbles.high)};
}
NIBBLE_INLINE Ints dot(Ints sums, const Ints (&w)[4], const int8_t* digits) {
  // Pairs of products, and four of those, stay below 2^15.
  __m256i low = _mm256_setzero_si256(), high = low;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    int32_t four = 0;
    __builtin_memcpy(&four, digits + 4 * i, sizeof(four));
    const __m256i x = _mm256_set1_epi32(four);
    low = _mm256_add_epi16(low, _mm256_maddubs_epi16(w[i].low, x));
    high = _mm256_add_epi16(high, _mm256_maddubs_epi16(w[i].high, x));
  }
  const __m256i one = _mm256_set1_epi16(1);
  return add(sums, {_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one)});
}
