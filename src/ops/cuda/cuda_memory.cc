#include "ops/cuda/cuda_memory.h"

#include "base/numbers.h"
#include "ops/cuda/errors.h"

namespace nibble::cuda {

Result<void*> CudaMemory::allocate(int64_t bytes, const std::string& purpose) {
  NIBBLE_CHECK(bytes >= 0);
  void* address = nullptr;
  const cudaError_t error = cudaMalloc(&address, static_cast<size_t>(bytes > 0 ? bytes : 1));
  if (error == cudaSuccess) return address;
  if (error != cudaErrorMemoryAllocation) fail(error, purpose);
  (void)cudaGetLastError();  // this failure is told here, not by the next launch
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), purpose);
  return user_error("{}: wanted {} of GPU memory, but only {} of {} is free", purpose, format_bytes(bytes),
                    format_bytes(static_cast<int64_t>(free_bytes)),
                    format_bytes(static_cast<int64_t>(total_bytes)));
}

void CudaMemory::free(void* address) { check(cudaFree(address), "free"); }

void CudaMemory::upload(void* to, const void* from_host, int64_t bytes) {
  if (bytes <= 0) return;
  check(cudaMemcpyAsync(to, from_host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
        "upload");
  check(cudaStreamSynchronize(stream_), "upload");
}

void CudaMemory::download(void* to_host, const void* from, int64_t bytes) {
  if (bytes <= 0) return;
  check(cudaMemcpyAsync(to_host, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
        "download");
  check(cudaStreamSynchronize(stream_), "download");
}

}  // namespace nibble::cuda
