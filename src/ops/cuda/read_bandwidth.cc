#include "ops/cuda/read_bandwidth.h"

#include <algorithm>
#include <cstdint>

#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"

namespace nibble::cuda {
namespace {

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "event"); }
  ~Event() { check(cudaEventDestroy(event_), "event"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

Result<double> read_bandwidth(Memory& memory, cudaStream_t stream, int multiprocessors) {
  constexpr int64_t kAbout = INT64_C(2) << 30;  // far more than any L2
  constexpr int kPasses = 8;
  const int64_t unit = read_all_unit(multiprocessors), bytes = std::max<int64_t>(1, kAbout / unit) * unit;
  NIBBLE_ASSIGN_OR_RETURN(const Buffer buffer,
                          Buffer::allocate(memory, bytes, "measuring the read bandwidth"));
  NIBBLE_ASSIGN_OR_RETURN(const Buffer sink, Buffer::allocate(memory, sizeof(uint32_t), "read bandwidth"));
  check(cudaMemsetAsync(buffer.as<void>(), 0, static_cast<size_t>(bytes), stream), "read bandwidth");
  Event begin, end;
  float best_ms = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    check(cudaEventRecord(begin.get(), stream), "read bandwidth");
    read_all(stream, buffer.as<void>(), bytes, multiprocessors, sink.as<uint32_t>());
    check(cudaEventRecord(end.get(), stream), "read bandwidth");
    check(cudaEventSynchronize(end.get()), "read bandwidth");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "read bandwidth");
    best_ms = pass == 0 ? ms : std::min(best_ms, ms);
  }
  return static_cast<double>(bytes) / (static_cast<double>(best_ms) / 1e3);
}

}  // namespace nibble::cuda
