// Delta attention, causal convolution and the choice of sparse attention, in tasks: what the methods of Ops
// of the same names do.
#pragma once

#include "ops/cpu/scratch.h"
#include "ops/mixer_args.h"

namespace nibble::cpu {

void kda_rows(ThreadPool& pool, const Kernels& kernels, const KdaArgs& args);
void causal_conv_rows(ThreadPool& pool, const Kernels& kernels, const CausalConvArgs& args);
void index_select_rows(ThreadPool& pool, const Kernels& kernels, const IndexSelectArgs& args,
                       Scratch& scratch);

}  // namespace nibble::cpu
