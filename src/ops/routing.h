// Routing on the host: scores, choice and weights, shared by the backends whose memory is the host's. The
// arithmetic is float32 throughout (spec models.md: router in float32).
#pragma once

#include "ops/ops.h"

namespace nibble {

void route_on_host(const RouteArgs& args);

}  // namespace nibble
