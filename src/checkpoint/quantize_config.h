// The JSON files of a quantized checkpoint: what readers learn about its format.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/quantize_plan.h"

namespace nibble {

// config.json of a directory whose weights are to be quantized. An error where there is none, and where it or
// hf_quant_config.json says that they are quantized already.
Result<nlohmann::ordered_json> read_source_config(const FileSystem& files, const std::string& directory);

// The value of "quantization_config" in the new config.json.
nlohmann::ordered_json quantization_config(const QuantizePlan& plan);

// The same for ModelOpt's layout, of any origin. `unquantized_modules` have a 2-D weight that is no NVFP4.
// W4A16_NVFP4 is ModelOpt's name for NVFP4 without activation scales; readers that find "NVFP4" wait for an
// input_scale of every matrix.
nlohmann::ordered_json modelopt_config(const std::vector<std::string>& unquantized_modules,
                                       bool has_activation_scales);

// hf_quant_config.json, which belongs to ModelOpt's layout, from that.
nlohmann::ordered_json hf_quant_config(nlohmann::ordered_json modelopt_config, const std::string& version);

}  // namespace nibble
