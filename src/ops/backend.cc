#include "ops/backend.h"

#include "base/thread_pool.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/reference/reference_ops.h"

namespace nibble {

Result<std::unique_ptr<Ops>> make_backend(const std::string& name, const BackendOptions& options) {
  if (options.threads < 0 || options.threads > 1024) {
    return user_error("threads: wanted 0 (all) to 1024, found {}", options.threads);
  }
  int threads = options.threads > 0 ? options.threads : usable_cpus();
  if (name == "reference") return make_reference_ops(threads);
  if (name == "cpu") return make_cpu_ops(threads, options.cpu_isa);
  return user_error("device '{}' is not in this build; there are: cpu, reference", name);
}

}  // namespace nibble
