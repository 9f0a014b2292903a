// The backends of this build, by name. The only place that knows them all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "ops/ops.h"

namespace nibble {

struct BackendOptions {
  int threads = 0;  // 0: one for each physical core that this process may use
  // Kernels of the cpu backend: "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon_dot", "generic";
  // "": the best here.
  std::string cpu_isa;
  // What products on the cpu backend take of activations: "exact" as docs/numerics.md says; "int8" 8 bits
  // with a scale for 32 columns where the weights are 4-bit ones in tiles and, by avx512_bf16 and amx,
  // bfloat16 where they are BF16. An error on other devices.
  std::string cpu_activations = "exact";
  // Whether the cuda backend multiplies BF16, NVFP4, MXFP4 and q4 weights on tensor cores: "on" (an error for
  // experts that it cannot), "off", "": where it can. The sums differ in their last bits, so this never
  // depends on the step.
  std::string tensor_cores;
  // Kernels of routed experts on the cuda backend: "few", "many" (rows an expert; an error where they cannot
  // run), "portable" (float32), or "auto". few and many give the same bits.
  std::string moe_path = "auto";
  std::string moe_paths_file;  // JSON of moe_layer_bench, for auto: from how many rows on many is faster
  bool cuda_graphs = true;     // the cuda backend records steps of few rows and replays them
};

// What make_backend knows, whether or not it is in this build and the machine has what it needs.
std::vector<std::string> backend_names();

// One of backend_names(). A user error where the name is another, or build or machine lack what it needs.
Result<std::unique_ptr<Ops>> make_backend(const std::string& name, const BackendOptions& options);

}  // namespace nibble
