// The kernels, once: included by kernels_<isa>.cc into an anonymous namespace after the primitives of one
// instruction set (vec_<isa>.h). Order matters: each file uses those before it.
#include "ops/cpu/vector_math.inc.h"
// (elementwise)
#include "ops/cpu/rows.inc.h"
// (matrices)
#include "ops/cpu/block.inc.h"
// (rows of activations)
#include "ops/cpu/fixed_rows.inc.h"
// (rows of weights)
#include "ops/cpu/weight_rows.inc.h"
// (their products)
#include "ops/cpu/linear.inc.h"
// (4-bit weights in tiles)
#include "ops/cpu/tiles.inc.h"
// (all of them)
#include "ops/cpu/products.inc.h"
// (attention)
#include "ops/cpu/attend.inc.h"

constexpr Kernels make_kernels(const char* isa) {
  return {isa,      pack,      linear,     gate_up,        attend,   rms_norm,    rope,     rope_interleaved,
          activate, add_array, add_scaled, softplus_array, multiply, multiply_by, exp_array};
}
