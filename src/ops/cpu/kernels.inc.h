// The kernels, once: included by kernels_<isa>.cc into an anonymous namespace after the primitives of one
// instruction set (vec_<isa>.h). Order matters: each file uses those before it.
#include "ops/cpu/vector_math.inc.h"
// (elementwise)
#include "ops/cpu/rows.inc.h"
// (matrices)
#include "ops/cpu/block.inc.h"
// (rows of activations)
#include "ops/cpu/bf16_pairs.inc.h"
// (in fixed point)
#include "ops/cpu/fixed_rows.inc.h"
// (rows of weights)
#include "ops/cpu/weight_rows.inc.h"
// (their products)
#include "ops/cpu/linear.inc.h"
// (of few rows with plain elements)
#include "ops/cpu/element_tiles.inc.h"
// (of BF16 in 12 bits)
#include "ops/cpu/bf16_in_12.inc.h"
// (4-bit weights in tiles)
#include "ops/cpu/tiles.inc.h"
// (by many rows, on machines with AMX)
#include "ops/cpu/amx_tiles.inc.h"
// (all of them)
#include "ops/cpu/products.inc.h"
// (attention)
#include "ops/cpu/attend.inc.h"
// (the rest)
#include "ops/cpu/mixers.inc.h"

constexpr Kernels make_kernels(const char* isa) {
  return {.isa = isa,
          .has_pairs = kHasPairs,
          .has_in_12 = kHasIn12,
          .pack = pack,
          .linear = linear,
          .gate_up = gate_up,
          .attend = attend,
          .attend_join = attend_join,
          .attend_finish = attend_finish,
          .kda = kda,
          .causal_conv = causal_conv,
          .pool_keys = pool_keys,
          .pool_scores = pool_scores,
          .hyper_collect = hyper_collect,
          .hyper_distribute = hyper_distribute,
          .layer_norm = layer_norm,
          .rms_norm = rms_norm,
          .rope = rope,
          .rope_interleaved = rope_interleaved,
          .activate = activate,
          .add = add_array,
          .add_scaled = add_scaled,
          .softplus = softplus_array,
          .sigmoid = sigmoid_array,
          .multiply = multiply,
          .multiply_by = multiply_by,
          .exp = exp_array};
}
