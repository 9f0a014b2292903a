// Which kernels routed experts on tensor cores take, those for few rows an expert or for many: with the same
// bits, so that this changes no result.
#pragma once

#include <map>
#include <string>

#include "base/result.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/device.h"
#include "ops/cuda/moe_decode.h"

namespace nibble::cuda {

struct MoePaths {
  std::string path = "auto";  // of BackendOptions; "portable" where tensor cores are off
  bool has_wgmma = false;
  std::string device = {};
  std::map<std::string, int> crossovers = {};  // of the device, measured: crossover_key() -> most_few

  // With `chosen` experts a token and the most_few that holds then.
  MoeShape choose(MoeShape shape, int64_t chosen) const;
};

// A user error where a forced path cannot run on the device. A file of crossovers that is not what
// moe_layer_bench prints is warned of, and with_many() is the rule.
Result<MoePaths> make_moe_paths(const Device& device, bool has_wgmma, const CudaOptions& options);

}  // namespace nibble::cuda
