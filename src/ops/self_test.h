// A small feed-forward of experts through every weight format, against the reference backend: a kernel that
// is wrong on this machine is caught before it answers anyone.
#pragma once

#include "base/result.h"
#include "ops/ops.h"

namespace nibble {

// Takes milliseconds. An internal error names the operation, the format and the deviation.
Status self_test(Ops& ops);

}  // namespace nibble
