// The table of kernels that each instruction set exports, and the plain structs that they take.
//
// One algorithm (kernels.inc.h), compiled once for each instruction set over the primitives of vec_<isa>.h.
// This header and everything that the kernel files include hold no inline function and no std container: the
// linker keeps one copy of an inline function, and a copy compiled for AVX-512 must never be the one that the
// generic path calls.
//
// Vectors have 16 float lanes on every instruction set (one, two or four registers), so lane orders, and with
// FMA the bits too, are the same on all of them. AVX2 and AVX-512 agree bit for bit.
#pragma once

#include <stdint.h>

#include "ops/activation.h"
#include "ops/limits.h"

// Primitives and inner loops must be inlined, or their vectors pass through memory.
#define NIBBLE_INLINE inline __attribute__((always_inline))

namespace nibble::cpu {

inline constexpr int64_t kLanes = 16;

// Packed rows: how `linear` wants its activations. A packed row is padded with zeros to a multiple of
// kPackedColumns. For rows of nibbles each 128 columns are transposed: column 8i + j of the 128 goes to place
// 16j + i, because lane i of a vector holds 32 bits of codes, which are the columns 8i .. 8i+7 of a weight
// row, and the j-th shift by 4 bits brings column 8i + j of all 16 lanes to the bottom at once.
inline constexpr int64_t kPackedColumns = 128;
enum class Packing { kPlain, kNibbles };

// MatrixFormat of quant/matrix.h without what that header includes; kDecoded is any format without a kernel
// of its own, whose rows become floats by `decode`.
enum class WeightFormat { kF32, kF16, kBF16, kNvfp4, kMxfp4, kQ4, kF8E4M3, kFp8Block, kDecoded };

// NaN among scales and FP8 codes is refused at load: here e4m3 reads it as 480, e8m0 as infinity.
struct Weights {
  WeightFormat format;
  Packing packing;     // of the activations that it is multiplied with
  const void* codes;   // [n, k], row-major
  const void* scales;  // as MatrixFormat says
  int64_t n, k;
  float tensor_scale;  // on the finished sum
  // kDecoded: MatrixFormatInfo's, of a format that has no scales apart from its codes.
  int64_t group, group_bytes;
  void (*decode)(const void* codes, const void* scales, int64_t count, float* out);
};

// Rows of packed activations: row r is at x + (index != null ? index[r] : r) * stride, 64-byte aligned.
struct PackedRows {
  const float* x;
  const int32_t* index;
  int64_t rows;
  int64_t stride;  // a multiple of kPackedColumns
};

// out[r * out_stride + n] = x[r] . w[n], for n in [first, last).
struct LinearTask {
  Weights w;
  PackedRows x;
  int64_t first, last;
  float* out;
  int64_t out_stride;
};

// out[r] = activation(x[r] . gate[n] + gate_bias[n], x[r] . up[n] + up_bias[n]) for n in [first, last), each
// at its place in `packing`; out rows are not padded by this.
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

}  // namespace nibble::cpu
