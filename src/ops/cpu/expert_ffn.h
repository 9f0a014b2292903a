// Ops::expert_ffn on the cpu: the same bits as its default body, in three loops without a barrier between
// experts (and one before them that packs the rows).
//
//   1. gate, up and activation: tasks are (expert, some of its I columns); the rows of an expert are read in
//      place through an index, and the activation is written where `down` wants it, packed
//   2. down: tasks are (expert, some of its D columns)
//   3. combine: tasks are tokens; in the order of a
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/scratch.h"
#include "ops/ops.h"

namespace nibble::cpu {

struct ExpertFfnScratch {
  Scratch packed;     // [T, D], packed
  Scratch activated;  // [R, I], packed
};

// Whether one packing serves all gate and up matrices, and one all down matrices, whatever their formats.
// REQUIRES W4A16.
bool can_fuse(const ExpertFfnArgs& args, Rounding rounding);

// REQUIRES can_fuse(args, rounding).
void fused_expert_ffn(ThreadPool& pool, const Kernels& kernels, const ExpertFfnArgs& args, Rounding rounding,
                      ExpertFfnScratch& scratch);

}  // namespace nibble::cpu
