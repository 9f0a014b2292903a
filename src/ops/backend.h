// The backends of this build, by name. The only place that knows them all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "ops/ops.h"

namespace nibble {

struct BackendOptions {
  int threads = 0;      // 0: as many as this process may use
  std::string cpu_isa;  // kernels of the cpu backend: "avx512", "avx2", "generic"; "": the best of them here
};

// What make_backend knows, whether or not it is in this build and the machine has what it needs.
std::vector<std::string> backend_names();

// One of backend_names(). A user error where the name is another, or build or machine lack what it needs.
Result<std::unique_ptr<Ops>> make_backend(const std::string& name, const BackendOptions& options);

}  // namespace nibble
