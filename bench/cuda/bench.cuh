// What the benches of kernels share: errors end the program, times are those of events on one stream, results
// are rows of a table and, with --json, one JSON object.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#define CHECK(call)                                                                                   \
  do {                                                                                                \
    cudaError_t error_ = (call);                                                                      \
    if (error_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (0)

inline cudaStream_t stream;

struct Timing {
  double median, low, high;
};
constexpr int kWarmUps = 5, kTimed = 21;
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
  for (int run = 0; run < kWarmUps + kTimed; ++run) {
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
    if (run >= kWarmUps) times.push_back(ms * 1000.0 / count);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}

struct Row {
  std::string name;
  long long rows = 0;           // tokens of the step
  double bytes = 0;             // of weights, each once
  double operations = 0;        // of the products as asked for
  Timing us = {};               // in a graph
  std::optional<Timing> eager;  // launched one by one
};

class Report {
 public:
  // Takes --json out of the arguments: then standard output has the object alone, and the text goes to
  // stderr.
  Report(int& argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      if (std::string_view(argv[i]) != "--json") continue;
      is_json_ = true;
      std::copy(argv + i + 1, argv + argc, argv + i);
      --argc;
    }
    text = is_json_ ? stderr : stdout;
  }

  std::FILE* text;

  // What the device reads in this run, GB/s; `device` is as the driver names it.
  void set_ceiling(const std::string& device, double ceiling) {
    device_ = device;
    ceiling_ = ceiling;
  }
  void head(const std::string& what) {
    what_ = what;
    std::fprintf(text, "%-28s %5s %9s %9s %9s %9s %8s %7s %8s %9s\n", what.c_str(), "rows", "MB", "us", "low",
                 "high", "GB/s", "share", "TFLOP/s", "eager us");
  }
  void row(const Row& row) {
    const double rate = row.bytes / row.us.median / 1e3, share = rate / ceiling_;
    const double teraflops = row.operations / row.us.median * 1e-6;
    std::fprintf(text, "%-28s %5lld %9.1f %9.1f %9.1f %9.1f %8.0f %6.1f%% %8.1f", row.name.c_str(), row.rows,
                 row.bytes / 1e6, row.us.median, row.us.low, row.us.high, rate, 100 * share, teraflops);
    if (row.eager) std::fprintf(text, " %9.1f", row.eager->median);
    std::fprintf(text, "\n");
    char json[600];
    std::snprintf(
        json, sizeof json,
        "{\"what\": \"%s\", \"name\": \"%s\", \"rows\": %lld, \"bytes\": %.0f, \"operations\": %.0f, "
        "\"us\": %.3f, \"low_us\": %.3f, \"high_us\": %.3f, \"gb_per_second\": %.1f, "
        "\"share_of_read_ceiling\": %.4f, \"read_ceiling_gb_per_second\": %.1f, \"tflop_per_second\": %.2f",
        what_.c_str(), row.name.c_str(), row.rows, row.bytes, row.operations, row.us.median, row.us.low,
        row.us.high, rate, share, ceiling_, teraflops);
    rows_ += (rows_.empty() ? "\n  " : ",\n  ") + std::string(json);
    if (row.eager) rows_ += ", \"eager_us\": " + std::to_string(row.eager->median);
    rows_ += "}";
  }
  // The object, if it was asked for.
  void finish() const {
    if (!is_json_) return;
    std::printf("{\"device\": \"%s\", \"timed_runs\": %d, \"rows\": [%s\n]}\n", device_.c_str(), kTimed,
                rows_.c_str());
  }

 private:
  bool is_json_ = false;
  std::string device_, what_, rows_;
  double ceiling_ = 0;
};
