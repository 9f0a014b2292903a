// What stands around a sequence: the `post_processor` part of tokenizer.json.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "text/json_fields.h"

namespace nibble {

struct PostProcessor {
  std::vector<int32_t> before, after;  // ids

  // Null for a missing part: nothing. TemplateProcessing (its `single`), ByteLevel (which moves offsets
  // only) and Sequence with at most one template. Ids must be below `id_end`.
  static Result<PostProcessor> parse(const Json* part, const std::string& where, int32_t id_end);
};

}  // namespace nibble
