#include "ops/cpu/cpu_ops.h"

#include "ops/reference/reference_ops.h"

namespace nibble {

std::unique_ptr<Ops> make_cpu_ops(int threads) { return make_reference_ops(threads); }

}  // namespace nibble
