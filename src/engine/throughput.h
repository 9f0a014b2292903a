// How fast a model runs: prompts in chunks, and decoding of several sequences at once. Token ids are random
// and there is no text, so any model will do; sampling is not part of it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "model/decoder.h"

namespace nibble {

// What runs in one repetition, from an empty context.
struct Workload {
  std::string name;       // "pp512", "tg128"
  int64_t sequences = 1;  // that run at once
  int64_t tokens = 0;     // of each sequence
  int64_t chunk = 1;      // of them in a step
  bool decodes = false;   // logits are wanted after every step, not only after the last

  int64_t steps() const { return (tokens + chunk - 1) / chunk; }
};

struct Throughput {
  Workload workload;
  std::vector<double> seconds;  // of each repetition, sorted
  int64_t weight_bytes = 0;  // that the steps of a repetition read; of routed experts those that were chosen
  double experts_a_layer = 0;  // distinct ones that a layer with experts reads in a step, on average

  double tokens() const { return static_cast<double>(workload.sequences * workload.tokens); }
  double median_seconds() const { return seconds[seconds.size() / 2]; }
  double weight_bytes_per_token() const { return static_cast<double>(weight_bytes) / tokens(); }
  double weight_bytes_per_second() const { return static_cast<double>(weight_bytes) / median_seconds(); }
};

// What a decoder needs to run all of them.
DecoderOptions options_for(const std::vector<Workload>& workloads);

// Steps done, of all of a measure(), warm-up included.
using StepProgress = std::function<void(int64_t done, int64_t total)>;

// Warms up, counts the experts that are chosen (the same in every repetition), then measures. What `progress`
// takes behind each step counts as its time. REQUIRES
// repetitions >= 1, and a decoder with options_for of this workload whose sequences are all free.
Result<Throughput> measure(Decoder& decoder, const Workload& workload, int64_t repetitions,
                           const StepProgress& progress = {});

}  // namespace nibble
