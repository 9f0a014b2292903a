// Primitives over NEON with the dot product of bytes (Armv8.2): a vector of 16 lanes is four registers.
// Included into an anonymous namespace, after <arm_neon.h>; what each primitive means is said in
// vec_generic.h.
#pragma once

struct Vec {
  float32x4_t part[4];
};
struct Ints {
  int32x4_t part[4];
};

// 32 registers: 16 for 2 x 2 accumulators, 8 for weights, 4 for an activation.
constexpr int kTileColumns = 2;
constexpr int kTileRows = 2;
constexpr int kFusedRows = 2;
constexpr int kFixedRows = 4;
constexpr int kElementTileColumns = 2;
constexpr int kElementTileRows = 2;
constexpr int kElementRows = 16;
constexpr int kAttendTileHeads = 1;

#include "ops/cpu/vec_four.inc.h"

NIBBLE_INLINE Vec splat(float x) { NIBBLE_EACH_PART(Vec, vdupq_n_f32(x)); }
NIBBLE_INLINE Vec zero() { return splat(0.0f); }
NIBBLE_INLINE Vec load(const float* p) { NIBBLE_EACH_PART(Vec, vld1q_f32(p + 4 * i)); }
NIBBLE_INLINE void store(float* p, Vec a) {
  vst1q_f32(p, a.part[0]);
  vst1q_f32(p + 4, a.part[1]);
  vst1q_f32(p + 8, a.part[2]);
  vst1q_f32(p + 12, a.part[3]);
}
NIBBLE_INLINE Vec add(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, vaddq_f32(a.part[i], b.part[i])); }
NIBBLE_INLINE Vec sub(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, vsubq_f32(a.part[i], b.part[i])); }
NIBBLE_INLINE Vec mul(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, vmulq_f32(a.part[i], b.part[i])); }
NIBBLE_INLINE Vec div(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, vdivq_f32(a.part[i], b.part[i])); }
NIBBLE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  NIBBLE_EACH_PART(Vec, vfmaq_f32(c.part[i], a.part[i], b.part[i]));
}
// Not vmaxq: of NaN and of zeros it makes others than the rest of the instruction sets.
NIBBLE_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
NIBBLE_INLINE Vec max(Vec a, Vec b) { NIBBLE_EACH_PART(Vec, larger(a.part[i], b.part[i])); }
NIBBLE_INLINE Vec at_least(float low, Vec a) { return max(splat(low), a); }
NIBBLE_INLINE float32x4_t smaller_of(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcltq_f32(a, b), a, b);
}
NIBBLE_INLINE Vec at_most(float high, Vec a) {
  NIBBLE_EACH_PART(Vec, smaller_of(vdupq_n_f32(high), a.part[i]));
}
NIBBLE_INLINE Ints bits(Vec a) { NIBBLE_EACH_PART(Ints, vreinterpretq_s32_f32(a.part[i])); }
NIBBLE_INLINE Vec from_bits(Ints a) { NIBBLE_EACH_PART(Vec, vreinterpretq_f32_s32(a.part[i])); }
NIBBLE_INLINE Ints splat_int(int32_t x) { NIBBLE_EACH_PART(Ints, vdupq_n_s32(x)); }
NIBBLE_INLINE Ints add(Ints a, Ints b) { NIBBLE_EACH_PART(Ints, vaddq_s32(a.part[i], b.part[i])); }
NIBBLE_INLINE Ints sub(Ints a, Ints b) { NIBBLE_EACH_PART(Ints, vsubq_s32(a.part[i], b.part[i])); }
NIBBLE_INLINE Ints bit_and(Ints a, Ints b) { NIBBLE_EACH_PART(Ints, vandq_s32(a.part[i], b.part[i])); }
template <int kBits>
NIBBLE_INLINE Ints shift_left(Ints a) {
  NIBBLE_EACH_PART(Ints, vshlq_n_s32(a.part[i], kBits));
}
template <int kBits>
NIBBLE_INLINE Ints shift_right(Ints a) {
  NIBBLE_EACH_PART(Ints, vshrq_n_s32(a.part[i], kBits));
}

NIBBLE_INLINE float32x4_t four_sums(Vec a) {
  return vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
}
// The lanes (0 + 2, 0 + 2, 1 + 3, 1 + 3) of two.
NIBBLE_INLINE float32x4_t pair_sums(float32x4_t a, float32x4_t b) {
  return vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b));
}
NIBBLE_INLINE float sum(Vec a) {
  const float32x4_t four = four_sums(a);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
NIBBLE_INLINE void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  const float32x4_t ab = pair_sums(four_sums(a), four_sums(b)), cd = pair_sums(four_sums(c), four_sums(d));
  vst1q_f32(p, vaddq_f32(vcombine_f32(vget_low_f32(ab), vget_low_f32(cd)),
                         vcombine_f32(vget_high_f32(ab), vget_high_f32(cd))));
}

NIBBLE_INLINE Vec load_bf16(const uint16_t* p) {
  NIBBLE_EACH_PART(Vec, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
NIBBLE_INLINE Vec load_f16(const uint16_t* p) {
  NIBBLE_EACH_PART(Vec, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
NIBBLE_INLINE Ints load_bytes(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),  //
           vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
}

NIBBLE_INLINE Vec to_float(Ints a) { NIBBLE_EACH_PART(Vec, vcvtq_f32_s32(a.part[i])); }
NIBBLE_INLINE void store(int32_t* p, Ints a) {
  vst1q_s32(p, a.part[0]);
  vst1q_s32(p + 4, a.part[1]);
  vst1q_s32(p + 8, a.part[2]);
  vst1q_s32(p + 12, a.part[3]);
}
NIBBLE_INLINE void store_digits(int8_t* p, Ints a) {
  const int8_t order[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  auto eight = [&](int i) __attribute__((always_inline)) {
    return vmovn_s16(vcombine_s16(vmovn_s32(a.part[i]), vmovn_s32(a.part[i + 1])));
  };
  vst1q_s8(p, vqtbl1q_s8(vcombine_s8(eight(0), eight(2)), vreinterpretq_u8_s8(vld1q_s8(order))));
}
NIBBLE_INLINE Vec load_scales_e4m3(const uint8_t* p) {
  const uint8x16_t codes = vld1q_u8(p);
  const uint16x8_t low = vshll_n_u8(vget_low_u8(codes), 7), high = vshll_n_u8(vget_high_u8(codes), 7);
  auto four = [](uint16x4_t halves) __attribute__((always_inline)) {
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
  };
  return {{four(vget_low_u16(low)), four(vget_high_u16(low)), four(vget_low_u16(high)),
           four(vget_high_u16(high))}};
}
NIBBLE_INLINE Ints load_codes(const uint8_t* p) {
  NIBBLE_EACH_PART(Ints, vreinterpretq_s32_u8(vld1q_u8(p + 16 * i)));
}
NIBBLE_INLINE Ints low_nibbles(Ints codes) { return bit_and(codes, splat_int(0x0F0F0F0F)); }
NIBBLE_INLINE Ints look_up(const int8_t* table, Ints nibbles) {
  const int8x16_t values = vld1q_s8(table);
  NIBBLE_EACH_PART(Ints, vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(nibbles.part[i]))));
}
NIBBLE_INLINE Ints e2m1_bytes(Ints nibbles) {
  const int8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  return look_up(table, nibbles);
}
NIBBLE_INLINE Ints int4_bytes(Ints nibbles) {
  const int8_t table[16] = {12, 13, 14, 15, 16, 17, 18, 19, 4, 5, 6, 7, 8, 9, 10, 11};
  return look_up(table, nibbles);
}
NIBBLE_INLINE int32x4_t dot_part(int32x4_t sums, const Ints (&w)[4], int8x16_t digits, int part) {
  sums = vdotq_laneq_s32(sums, vreinterpretq_s8_s32(w[0].part[part]), digits, 0);
  sums = vdotq_laneq_s32(sums, vreinterpretq_s8_s32(w[1].part[part]), digits, 1);
  sums = vdotq_laneq_s32(sums, vreinterpretq_s8_s32(w[2].part[part]), digits, 2);
  return vdotq_laneq_s32(sums, vreinterpretq_s8_s32(w[3].part[part]), digits, 3);
}
NIBBLE_INLINE Ints dot(Ints sums, const Ints (&w)[4], const int8_t* digits) {
  const int8x16_t all = vld1q_s8(digits);
  NIBBLE_EACH_PART(Ints, dot_part(sums.part[i], w, all, i));
}
#undef NIBBLE_EACH_PART
