// What the benches of kernels share: errors end the program, times are those of events on one stream.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                          \
  do {                                                                                       \
    cudaError_t error_ = (call);                                                             \
    if (error_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

inline cudaStream_t stream;

struct Timing {
  double median, low, high;
};
// Microseconds of `work(i)` for i = 0..count-1 in one graph (or launched one by one), per call.
template <class Work>
Timing time_us(int count, bool graph, Work work) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  cudaGraphExec_t exec = nullptr;
  if (graph) {
    cudaGraph_t g;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) work(i);
    CHECK(cudaStreamEndCapture(stream, &g));
    CHECK(cudaGraphInstantiate(&exec, g, 0));
  }
  std::vector<double> times;
  for (int run = 0; run < 15; ++run) {
    CHECK(cudaEventRecord(begin, stream));
    if (graph) {
      CHECK(cudaGraphLaunch(exec, stream));
    } else {
      for (int i = 0; i < count; ++i) work(i);
    }
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (run >= 5) times.push_back(ms * 1000.0 / count);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}
