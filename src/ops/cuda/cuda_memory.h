// The device's memory. Copies run on the backend's stream, behind the operations before them. When they
// return, the host's bytes are the caller's again; small ones go through pinned memory, so that an upload
// need not wait.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "ops/memory.h"

namespace nibble::cuda {

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(cudaStream_t stream);
  ~CudaMemory() override;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  Result<void*> allocate(int64_t bytes, const std::string& purpose) override;
  int64_t most_bytes() const override;  // of the whole device
  void free(void* address) override;
  void upload(void* to, const void* from_host, int64_t bytes) override;
  void download(void* to_host, const void* from, int64_t bytes) override;

 private:
  void wait();

  cudaStream_t stream_;
  std::byte* pinned_ = nullptr;
  int64_t pinned_used_ = 0;  // by uploads that may be under way
};

}  // namespace nibble::cuda
