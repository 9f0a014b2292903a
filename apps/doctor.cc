// nibble doctor: what this machine has to compute with, and whether it computes right.
#include <fmt/format.h>

#include <cstdio>

#include "commands.h"
#include "model_path.h"
#include "ops/backend.h"
#include "ops/self_test.h"

namespace nibble {

Status doctor_command(const DoctorOptions& options) {
  const bool asked = !options.device.empty();
  for (const std::string& name : asked ? std::vector{options.device} : backend_names()) {
    auto backend = make_backend(name, {.moe_paths_file = moe_paths_file()});
    if (!backend.ok()) {
      if (asked) return backend.status();
      fmt::print("{:<10} not here: {}\n", name, backend.status().message());
      continue;
    }
    const std::unique_ptr<Ops> ops = std::move(backend).value();
    fmt::print("{:<10} {}\n", name, ops->description());
    for (const std::string& line : ops->choices()) fmt::print("{:<10} {}\n", "", line);
    std::fflush(stdout);  // what stands here is known even if the test ends the program
    NIBBLE_RETURN_IF_ERROR(self_test(*ops));
    fmt::print("{:<10} self-test passed\n", "");
  }
  return {};
}

}  // namespace nibble
