// The CUDA device that the backend runs on.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace nibble::cuda {

struct Device {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int compiled_for = 0;      // that of the code that runs on it (kernels.h)
  int multiprocessors = 0;
  int64_t shared_bytes = 0;  // shared memory that a block can have, by opting in
  int64_t free_bytes = 0, total_bytes = 0;
  int driver_version = 0, runtime_version = 0;  // 13000 is 13.0

  // One line: all of the above.
  std::string describe() const;
};

// The current device. Without one, or with one that this build has no kernels for, a user error of one line.
Result<Device> find_device();

}  // namespace nibble::cuda
