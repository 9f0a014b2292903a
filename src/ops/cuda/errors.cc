#include "ops/cuda/errors.h"

#include <fmt/format.h>

#include "base/check.h"

namespace nibble::cuda {

void fail(cudaError_t error, std::string_view operation) {
  const std::string message = fmt::format("CUDA, {}: {}", operation, cudaGetErrorString(error));
  check_failed(__FILE__, __LINE__, message.c_str());
}

void check_launch(std::string_view operation, int64_t rows, int64_t n, int64_t k) {
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    fail(error, fmt::format("{} of {} rows [{}, {}]", operation, rows, n, k));
}

}  // namespace nibble::cuda
