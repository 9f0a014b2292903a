// model.safetensors.index.json: which shard file holds which tensor.
#pragma once

#include <map>
#include <string>

#include "base/file.h"
#include "base/result.h"

namespace nibble {

// The `weight_map` of the index at `path`: tensor -> shard. Every shard is the plain name of a file in the
// same directory: a path, "..", or a control character in it is an error. Other keys are skipped.
Result<std::map<std::string, std::string>> read_shard_index(const FileSystem& files, const std::string& path);

}  // namespace nibble
