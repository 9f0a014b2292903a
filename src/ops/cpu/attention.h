// Attention of a step's rows in tasks.
#pragma once

#include "ops/cpu/scratch.h"
#include "ops/op_args.h"

namespace nibble {
struct Selection;
}

namespace nibble::cpu {

// What Ops::attend and, with a selection, Ops::attend_selected do.
//
// What a row sees is cut into pieces of kPiecePositions, so that the context of a single row keeps all
// threads busy; pieces are joined in their order, for any number of threads.
void attend_rows(ThreadPool& pool, const Kernels& kernels, const AttendArgs& args, const Selection* selection,
                 Scratch& scratch);

}  // namespace nibble::cpu
