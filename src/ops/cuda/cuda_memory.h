// The device's memory. Copies run on the backend's stream, behind the operations before them, and are done
// when they return: the host's bytes are then the caller's again.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/memory.h"

namespace nibble::cuda {

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(cudaStream_t stream) : stream_(stream) {}
  Result<void*> allocate(int64_t bytes, const std::string& purpose) override;
  void free(void* address) override;
  void upload(void* to, const void* from_host, int64_t bytes) override;
  void download(void* to_host, const void* from, int64_t bytes) override;

 private:
  cudaStream_t stream_;
};

}  // namespace nibble::cuda
