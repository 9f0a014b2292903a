// Whether this machine has what the cuda backend needs.
#pragma once

#include <string>
#include <vector>

#include "ops/backend.h"

namespace nibble {

// ok, or why there is no cuda backend here.
inline const Status& gpu_status() {
  static const Status status = make_backend("cuda", {}).status();
  return status;
}

// `names`, and "cuda" where it is.
inline std::vector<std::string> with_gpu(std::vector<std::string> names) {
  if (gpu_status().ok()) names.emplace_back("cuda");
  return names;
}

}  // namespace nibble
