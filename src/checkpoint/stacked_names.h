// What a checkpoint that stacks the experts of a layer (gpt-oss) calls them.
#pragma once

#include <string>

namespace nibble {

// The parameters, behind the layer's name for experts.
inline constexpr const char* kStackedGateUp = "gate_up_proj";
inline constexpr const char* kStackedDown = "down_proj";

// The tensors of one: codes and scales of MXFP4, or what is plain under the parameter's own name.
struct StackedNames {
  explicit StackedNames(const std::string& parameter)
      : plain(parameter),
        blocks(parameter + "_blocks"),
        scales(parameter + "_scales"),
        bias(parameter + "_bias") {}

  std::string plain, blocks, scales, bias;
};

}  // namespace nibble
