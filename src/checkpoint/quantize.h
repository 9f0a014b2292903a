// A model directory in BF16, F16 or F32 to one in 4 bits.
//
// Memory: a buffer of some megabytes a thread (gpt-oss: one expert's matrix), however large the model.
// The same bytes come out for any number of threads, and a killed run can be gone on from: checkpoint_job.h.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/checkpoint_job.h"

namespace nibble {

enum class QuantizeType {
  kNvfp4,  // ModelOpt's layout, weights only (W4A16_NVFP4)
  kMxfp4,  // gpt-oss's layout for gpt-oss, compressed-tensors mxfp4-pack-quantized for others
  kQ4,     // docs/formats.md, "q4"
};
enum class QuantizeWhat {
  kExperts,    // routed experts
  kAllLinear,  // and the linear layers of attention, dense and shared feed-forward
};
std::string_view quantize_type_name(QuantizeType type);  // "nvfp4"
std::string_view quantize_what_name(QuantizeWhat what);  // "all-linear"

struct QuantizeOptions {
  std::string source, destination;
  QuantizeType type = QuantizeType::kNvfp4;
  QuantizeWhat what = QuantizeWhat::kExperts;
  int threads = 1;
  int64_t max_shard_bytes = 5'000'000'000;  // a tensor with its scales is never split, so one may be larger
  std::string version;                      // of this program, for hf_quant_config.json
  // Called now and then, by one thread at a time.
  std::function<void(const JobProgress&)> progress;
};

struct QuantizeSummary {
  int64_t tensors = 0;  // quantized
  int64_t kept = 0;     // wanted, but K is no multiple of the group
  int64_t source_bytes = 0, output_bytes = 0;
  int64_t shards = 0, resumed_shards = 0;
};

// Reads through `files`, writes to the real file system. REQUIRES threads >= 1, max_shard_bytes >= 1.
// An error leaves DST as it was, or with a .partial that a later run goes on from.
Result<QuantizeSummary> quantize_model(const FileSystem& files, const QuantizeOptions& options);

}  // namespace nibble
