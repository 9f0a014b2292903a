// A 4-bit model of another layout to ModelOpt's, with its codes and scales as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/checkpoint_job.h"

namespace nibble {

struct ConvertOptions {
  std::string source, destination;
  int threads = 1;
  int64_t max_shard_bytes = 5'000'000'000;  // what belongs to one matrix is never split
  std::string version;                      // of this program, for hf_quant_config.json
  std::function<void(const JobProgress&)> progress;
  // Matrices in block formats without an equivalent, of linear layers, become NVFP4 instead of BF16.
  bool requantize = false;
};

struct ConvertSummary {
  int64_t kept = 0;         // 4-bit matrices whose codes and scales are the source's
  int64_t decoded = 0;      // to BF16, for want of an equivalent
  int64_t requantized = 0;  // to NVFP4
  int64_t source_bytes = 0, output_bytes = 0;
  int64_t shards = 0, resumed_shards = 0;
};

// From the NVFP4 of compressed-tensors. The tensor scale becomes its reciprocal in float32, which is what a
// reader of the source computes with; an activation scale likewise, or it is left out where it is 0. All
// other tensors and files are copied. Reads through `files`, writes to the real file system; memory: some
// megabytes a thread. Can be gone on from when it was killed: checkpoint_job.h.
Result<ConvertSummary> convert_compressed_tensors(const FileSystem& files, const ConvertOptions& options);

}  // namespace nibble
