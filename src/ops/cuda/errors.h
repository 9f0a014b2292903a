// What is done when a call of the CUDA runtime fails that no caller can mend.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

namespace nibble::cuda {

// Stops the program with `operation` and the runtime's words: for failures that leave the device unusable
// and that no caller can mend.
[[noreturn]] void fail(cudaError_t error, std::string_view operation);
inline void check(cudaError_t error, std::string_view operation) {
  if (error != cudaSuccess) fail(error, operation);
}

// After a launch: a grid that cannot be, or a failure of an operation before. The sizes (0: none) are those
// that the operation is best known by.
void check_launch(std::string_view operation, int64_t rows, int64_t n = 0, int64_t k = 0);

}  // namespace nibble::cuda
