// The arithmetic of experts as flags and reports name it.
#pragma once

#include <string>

#include "base/result.h"
#include "commands.h"
#include "ops/ops.h"

namespace nibble {

Result<ExpertArithmetic> arithmetic_of(const ModelOptions& options);
// "w4a16", "w4a4, scale row"
std::string describe(const ExpertArithmetic& arithmetic);

}  // namespace nibble
