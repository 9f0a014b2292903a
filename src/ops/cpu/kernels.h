// The table of kernels that each instruction set exports, and the plain structs that they take.
//
// One algorithm (kernels.inc.h), compiled once for each instruction set over the primitives of vec_<isa>.h.
// This header and everything that the kernel files include hold no inline function and no std container: the
// linker keeps one copy of an inline function, and a copy compiled for AVX-512 must never be the one that the
// generic path calls.
//
// Vectors have 16 float lanes on every instruction set (one, two or four registers), so lane orders, and with
// FMA the bits too, are the same on all of them. AVX2, AVX-512 and NEON agree bit for bit.
#pragma once

#include <stdint.h>

#include "ops/activation.h"
#include "ops/limits.h"

// Primitives and inner loops must be inlined, or their vectors pass through memory.
#define NIBBLE_INLINE inline __attribute__((always_inline))

namespace nibble::cpu {

inline constexpr int64_t kLanes = 16;

// Packed rows: how `linear` wants its activations. The last kPackedColumns columns are padded with zeros.
//   kPlain  floats
//   kFixed  for weights in tiles: a FixedGroup for each kPackedColumns columns
//   kInt8   the same, rounded to 8 bits: an Int8Group
//   kPairs  bfloat16, two columns in the room of a float
inline constexpr int64_t kPackedColumns = 128;
enum class Packing { kPlain, kFixed, kInt8, kPairs };

// 128 columns of a row in fixed point: column = q * scale, with a power of two for scale and |q| <= 2^22, so
// that a column is off by at most 2^-22 of the group's largest. The sum of 32 products with integers of at
// most 12 is below 2^31: integer sums over the block of a weight scale are exact, in any order, on any
// machine.
struct FixedGroup {
  static constexpr int kSets = 8, kDigits = 3;
  // q = (digit 0 * 256 + digit 1) * 256 + digit 2. A set is 16 columns: the even ones of its first 8, the odd
  // ones of them, and the same of its last 8, as the nibbles of four bytes give them.
  int8_t digits[kSets][kDigits][16];
  int32_t starts[kSets];  // -12 * sum of q: weights are multiplied as integers that are 12 too large
  float scale;            // NaN where a column is not finite
  float unused[7];
};
static_assert(sizeof(FixedGroup) == 448);

// The same in one digit, with a scale for each 32 columns: column = q * block_scales[column / 32] * scale and
// |q| <= 127, so that a column is off by at most 1/254 of the largest of its 32.
struct Int8Group {
  static constexpr int kSets = FixedGroup::kSets, kDigits = 1;
  static constexpr int64_t kBlockColumns = 32;
  int8_t digits[kSets][kDigits][16];
  int32_t starts[kSets];
  float scale;
  float block_scales[kPackedColumns / kBlockColumns];
  float unused[3];
};
static_assert(sizeof(Int8Group) == 192);

// Floats of the packed form of kPackedColumns columns, by Packing.
inline constexpr int64_t kPackedGroupFloats[] = {kPackedColumns, sizeof(FixedGroup) / sizeof(float),
                                                 sizeof(Int8Group) / sizeof(float), kPackedColumns / 2};

// Weights in tiles (weight_tiles.h): so many rows of a matrix side by side.
inline constexpr int64_t kTileWeightRows = kLanes;

// BF16 in 12 bits (bf16_in_12.h): columns and bytes of a run, and the base that marks one of 16 bits.
inline constexpr int64_t kRunColumns = 128, kRunBytes = kRunColumns * 12 / 8;
inline constexpr uint32_t kMarkedRun = 0xFFFFFFFF;

// MatrixFormat of quant/matrix.h without what that header includes; NVFP4, MXFP4 and q4 in tiles; kDecoded is
// any format without a kernel of its own (4-bit rows that are not in tiles, too), whose rows become floats by
// `decode`; kBF16In12 is BF16 in 12 bits; ...Pairs are both as Packing::kPairs multiplies them.
enum class WeightFormat {
  kF32,
  kF16,
  kBF16,
  kBF16Pairs,
  kBF16In12,
  kBF16In12Pairs,
  kNvfp4,
  kMxfp4,
  kQ4,
  kF8E4M3,
  kFp8Block,
  kDecoded
};

// NaN among scales and FP8 codes is refused at load: here e4m3 reads it as 480, e8m0 as infinity.
struct Weights {
  WeightFormat format;
  Packing packing;     // of the activations that it is multiplied with
  const void* codes;   // [n, k], row-major; or tiles; or runs
  const void* scales;  // as MatrixFormat says; not of tiles; of runs their bases
  int64_t n, k;        // of pairs k counts those
  float tensor_scale;  // on the finished sum
  // kDecoded: MatrixFormatInfo's, of a format whose scales are of one row each.
  int64_t group, group_bytes, scale_columns, scale_bytes;
  void (*decode)(const void* codes, const void* scales, int64_t count, float* out);
};

// Rows of packed activations: row r is at x + (index != null ? index[r] : r) * stride, 64-byte aligned. What
// is not kPlain is passed as the floats that it takes the room of.
struct PackedRows {
  const float* x;
  const int32_t* index;
  int64_t rows;
  int64_t stride;  // a multiple of kPackedGroupFloats
};

// out[r * out_stride + n] = x[r] . w[n], for n in [first, last); of tiles first is that of one.
struct LinearTask {
  Weights w;
  PackedRows x;
  int64_t first, last;
  float* out;
  int64_t out_stride;
};

// out[r] = activation(x[r] . gate[n] + gate_bias[n], x[r] . up[n] + up_bias[n]) for n in [first, last),
// packed. REQUIRES first a multiple of kPackedColumns, and last too or the matrices' end.
struct GateUpTask {
  Weights gate, up;        // of one packing
  const float* gate_bias;  // [n]; null: none
  const float* up_bias;
  ActivationSpec activation;
  PackedRows x;
  int64_t first, last;
  Packing packing;
  float* out;
  int64_t out_stride;
};

// Some heads of one row that share a key/value head, over a piece of what the row sees: attend.inc.h.
inline constexpr int64_t kAttendHeads = 32;  // of one task
struct AttendTask {
  const float* q;  // [heads, head_dim]
  int64_t heads;
  const float* keys;
  const float* values;
  const int32_t* table;  // the sequence's row of the page table
  int64_t table_pages, page_tokens, kv_heads, head_dim, value_dim, kv_head;
  const int32_t* positions;  // those that the row sees; null: all
  int64_t first, last;       // positions, or places in `positions`
  float scale;
  // Of each head, overwritten: top score, sum of exp(score - top), and that of exp(score - top) * value,
  // whose padding up to out_stride is undefined.
  float* top;
  float* total;
  float* out;
  int64_t out_stride;  // round_up(value_dim, kLanes)
};

// One head of one row of delta attention; ops/mixer_args.h says the formula.
struct KdaTask {
  const float *q, *k, *v, *decay, *dt_bias;  // [dim]
  float beta, a_log;
  const float* gate_lower_bound;  // null: softplus
  int64_t dim;
  float* state;  // [dim, dim]
  float* out;    // [dim]
};

// n channels of one row of a causal convolution.
struct ConvTask {
  const float* x;       // [n]
  const float* weight;  // [taps, n]
  int64_t taps, n;
  float* state;  // [taps - 1], state_stride apart
  int64_t state_stride;
  float* out;  // [n]
};

// Some complete pools of one sequence.
inline constexpr int64_t kPoolsAtOnce = 64;
struct PoolTask {
  const float* keys;      // [tokens, dim]
  const float* gates;     // [tokens, dim]
  const float* ape;       // [pool, dim]
  const int64_t* tokens;  // [count, pool] which tokens the pools are made of
  int64_t dim, pool, count;
  float* keys_out;  // [count, dim]
};

// Every function of a row or an array gives for an element the same bits whatever n or the place in it.
struct Kernels {
  const char* isa;
  bool has_pairs;  // Packing::kPairs
  bool has_in_12;  // BF16 in 12 bits
  // k columns of a row, or of some groups of it.
  void (*pack)(Packing packing, const float* x, int64_t k, float* packed);
  void (*linear)(const LinearTask& task);
  void (*gate_up)(const GateUpTask& task);
  void (*attend)(const AttendTask& task);
  // Joins a piece of n values to those before it, in place.
  void (*attend_join)(const float* piece, float piece_top, float piece_total, int64_t n, float* o, float* top,
                      float* total);
  void (*attend_finish)(float total, int64_t n, float* o);  // o /= total
  void (*kda)(const KdaTask& task);
  void (*causal_conv)(const ConvTask& task);
  void (*pool_keys)(const PoolTask& task);
  // Of up to kPoolsAtOnce pools.
  void (*pool_scores)(const float* q, const float* weights, int64_t heads, int64_t dim, float scale,
                      const float* keys, int64_t count, float* scores);
  void (*hyper_collect)(const float* streams, const float* weights, int64_t count, int64_t width, float* out);
  void (*hyper_distribute)(const float* y, const float* post, const float* comb, int64_t count, int64_t width,
                           float* streams);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                     float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // Rotates pairs (i, i + half) of one head.
  void (*rope)(float* head, const float* cosines, const float* sines, int64_t half);
  // Rotates pairs (2i, 2i + 1).
  void (*rope_interleaved)(float* head, const float* cosines, const float* sines, int64_t half);
  void (*activate)(const ActivationSpec& spec, const float* gate, const float* up, int64_t n, float* out);
  void (*add)(const float* y, int64_t n, float* x);                       // x += y
  void (*add_scaled)(const float* y, float weight, int64_t n, float* x);  // x += weight * y, two roundings
  void (*softplus)(const float* x, int64_t n, float* out);
  void (*sigmoid)(const float* x, int64_t n, float* out);
  void (*multiply)(const float* y, int64_t n, float* x);   // x *= y
  void (*multiply_by)(float factor, int64_t n, float* x);  // x *= factor
  void (*exp)(const float* x, int64_t n, float* out);      // what attend and silu use; here for its test
};

// Null where this build has no such kernels.
const Kernels* kernels_generic();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512_bf16();
const Kernels* kernels_amx();
const Kernels* kernels_neon_dot();

}  // namespace nibble::cpu
