#include "ops/cuda/cuda_memory.h"

#include <cstring>

#include "base/numbers.h"
#include "ops/cuda/errors.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kPinned = INT64_C(4) << 20, kSmall = INT64_C(64) << 10;  // bytes

}  // namespace

Result<void*> PinnedMemory::allocate(int64_t bytes, const std::string& purpose) {
  NIBBLE_CHECK(bytes >= 0);
  void* address = nullptr;
  const cudaError_t error = cudaMallocHost(&address, static_cast<size_t>(bytes > 0 ? bytes : 1));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // as in CudaMemory::allocate
    return user_error("{}: no pinned memory for {}", purpose, format_bytes(bytes));
  }
  check(error, purpose);
  bytes_[static_cast<const std::byte*>(address)] = bytes;
  return address;
}

void PinnedMemory::free(void* address) {
  bytes_.erase(static_cast<const std::byte*>(address));
  check(cudaFreeHost(address), "free");
}

void PinnedMemory::upload(void* to, const void* from_host, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from_host, static_cast<size_t>(bytes));
}

void PinnedMemory::download(void* to_host, const void* from, int64_t bytes) { upload(to_host, from, bytes); }

bool PinnedMemory::holds(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  auto after = bytes_.upper_bound(at);
  if (after == bytes_.begin()) return false;
  --after;
  return at < after->first + after->second;
}

CudaMemory::CudaMemory(cudaStream_t stream) : stream_(stream) {
  void* pinned = nullptr;
  check(cudaMallocHost(&pinned, kPinned), "pinned memory");
  pinned_ = static_cast<std::byte*>(pinned);
}

CudaMemory::~CudaMemory() { check(cudaFreeHost(pinned_), "pinned memory"); }

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

int64_t CudaMemory::most_bytes() const {
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "memory");
  return static_cast<int64_t>(free_bytes);
}

void CudaMemory::free(void* address) { check(cudaFree(address), "free"); }

void CudaMemory::upload(void* to, const void* from_host, int64_t bytes) {
  if (bytes <= 0) return;
  const bool small = bytes <= kSmall;
  if (small) {
    if (pinned_used_ + bytes > kPinned) wait();
    std::memcpy(pinned_ + pinned_used_, from_host, static_cast<size_t>(bytes));
    from_host = pinned_ + pinned_used_;
    pinned_used_ += round_up(bytes, 64);
  }
  check(cudaMemcpyAsync(to, from_host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
        "upload");
  if (!small) wait();
}

void CudaMemory::download(void* to_host, const void* from, int64_t bytes) {
  if (bytes <= 0) return;
  // Through memory that is not pinned a copy takes several times as long, and so does the host's own.
  const bool staged = bytes <= kPinned && !host_side_.holds(to_host);
  check(cudaMemcpyAsync(staged ? pinned_ : to_host, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                        stream_),
        "download");
  wait();
  if (staged) std::memcpy(to_host, pinned_, static_cast<size_t>(bytes));
}

void CudaMemory::wait() {
  check(cudaStreamSynchronize(stream_), "copies");
  pinned_used_ = 0;
}

}  // namespace nibble::cuda
