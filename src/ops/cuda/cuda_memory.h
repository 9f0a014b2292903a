// The device's memory. Copies run on the backend's stream, behind the operations before them. When they
// return, the host's bytes are the caller's again; small ones go through pinned memory, so that an upload
// need not wait.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <string>

#include "ops/memory.h"

namespace nibble::cuda {

// Pinned memory of the host, which the device reads and writes itself.
class PinnedMemory final : public Memory {
 public:
  Result<void*> allocate(int64_t bytes, const std::string& purpose) override;
  void free(void* address) override;
  void upload(void* to, const void* from_host, int64_t bytes) override;
  void download(void* to_host, const void* from, int64_t bytes) override;
  bool holds(const void* address) const;

 private:
  std::map<const std::byte*, int64_t> bytes_;  // of each allocation
};

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(cudaStream_t stream);
  ~CudaMemory() override;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  Result<void*> allocate(int64_t bytes, const std::string& purpose) override;
  int64_t most_bytes() const override;
  void free(void* address) override;
  void upload(void* to, const void* from_host, int64_t bytes) override;
  void download(void* to_host, const void* from, int64_t bytes) override;
  Memory& host_side() override { return host_side_; }

 private:
  void wait();

  cudaStream_t stream_;
  PinnedMemory host_side_;
  std::byte* pinned_ = nullptr;
  int64_t pinned_used_ = 0;  // by uploads that may be under way
};

}  // namespace nibble::cuda
