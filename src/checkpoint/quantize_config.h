// The JSON files of a quantized checkpoint: what readers learn about its format.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/quantize_plan.h"

namespace nibble {

// config.json of a directory whose weights are to be quantized. An error where there is none, and where it or
// hf_quant_config.json says that they are quantized already.
Result<nlohmann::ordered_json> read_source_config(const FileSystem& files, const std::string& directory);

// The value of "quantization_config" in the new config.json.
nlohmann::ordered_json quantization_config(const QuantizePlan& plan);

// hf_quant_config.json, which belongs to ModelOpt's layout. REQUIRES the plan to be of kNvfp4.
nlohmann::ordered_json hf_quant_config(const QuantizePlan& plan, const std::string& version);

// model.safetensors.index.json.
nlohmann::ordered_json shard_index(const QuantizePlan& plan);

}  // namespace nibble
