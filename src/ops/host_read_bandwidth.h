// How fast the processors of a pool read host memory.
#pragma once

#include "base/result.h"
#include "base/thread_pool.h"

namespace nibble {

// Bytes a second; see Ops::read_bandwidth.
Result<double> host_read_bandwidth(ThreadPool& pool);

}  // namespace nibble
