#include "ops/backend.h"

#include <fmt/ranges.h>

#include "base/thread_pool.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/reference/reference_ops.h"
#ifdef NIBBLE_CUDA
#include "ops/cuda/cuda_ops.h"
#endif

namespace nibble {

std::vector<std::string> backend_names() { return {"cpu", "cuda", "reference"}; }

Result<std::unique_ptr<Ops>> make_backend(const std::string& name, const BackendOptions& options) {
  if (options.threads < 0 || options.threads > 1024) {
    return user_error("threads: wanted 0 (all) to 1024, found {}", options.threads);
  }
  if (options.tensor_cores != "" && options.tensor_cores != "on" && options.tensor_cores != "off") {
    return user_error("tensor-cores: wanted on or off, found '{}'", options.tensor_cores);
  }
  if (options.cpu_activations != "exact" && options.cpu_activations != "int8") {
    return user_error("cpu-activations: wanted exact or int8, found '{}'", options.cpu_activations);
  }
  const std::string& path = options.moe_path;
  if (path != "auto" && path != "few" && path != "many" && path != "portable")
    return user_error("moe-path: wanted auto, few, many or portable, found '{}'", path);
  if (path != "auto" && name != "cuda")
    return user_error("moe-path {}: wanted device 'cuda' with it, found '{}'", path, name);
  const bool int8_activations = options.cpu_activations == "int8";
  if (int8_activations && name != "cpu") {
    return user_error("cpu-activations int8: wanted device 'cpu' with it, found '{}'", name);
  }
  int threads = options.threads > 0 ? options.threads : usable_cores();
  if (name == "reference") return make_reference_ops(threads);
  if (name == "cpu") return make_cpu_ops(threads, options.cpu_isa, int8_activations);
#ifdef NIBBLE_CUDA
  if (name == "cuda")
    return make_cuda_ops({options.tensor_cores, path, options.moe_paths_file, options.cuda_graphs});
#else
  if (name == "cuda")
    return user_error("device 'cuda': this build has no CUDA, since it was made without nvcc");
#endif
  return user_error("device '{}' is unknown; there are: {}", name, fmt::join(backend_names(), ", "));
}

}  // namespace nibble
