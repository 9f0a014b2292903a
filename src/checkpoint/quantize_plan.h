// What `quantize` makes of which tensor, and in which file it goes: pure decisions, nothing is read or
// written.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/result.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize.h"

namespace nibble {

// Columns that share a scale.
int64_t quantize_group(QuantizeType type);

// Whether the 2-D tensor of this name is to be quantized: PREFIX.experts.<number>.ANY.weight; with kAllLinear
// also the projections of attention, dense and shared feed-forward. Never embeddings, heads, routers, norms,
// the indexers of sparse attention (which choose, as routers do) or towers of other modalities.
bool wants_quantization(const std::string& tensor, QuantizeWhat what);

// One source tensor and what becomes of it.
struct QuantizeItem {
  enum class Kind {
    kCopy,     // as it is
    kMatrix,   // [N, K]
    kStacked,  // gpt-oss: [E, K, N], to be transposed
  };
  Kind kind = Kind::kCopy;
  const TensorInfo* source = nullptr;  // lives in the Checkpoint
  int64_t slices = 1, n = 0, k = 0;    // of kMatrix (one slice) and kStacked (E slices)
  // Index into ShardPlan::tensors: the copy; or the codes, followed by the block scales and (NVFP4) the
  // tensor scale.
  size_t first_output = 0;
};

struct ShardPlan {
  std::string file_name;
  std::vector<QuantizeItem> items;
  std::vector<TensorInfo> tensors;  // name, dtype, shape and bytes
  int64_t source_bytes = 0;
};

struct QuantizePlan {
  QuantizeType type = QuantizeType::kNvfp4;
  bool gpt_oss = false;
  std::vector<ShardPlan> shards;
  std::vector<std::string> unquantized_modules;  // with a 2-D weight; sorted
  int64_t quantized = 0;
  std::vector<std::string> kept;  // wanted, but K is no multiple of the group
  int64_t source_bytes = 0;
};

// `checkpoint` must outlive the plan. Refuses a checkpoint that is quantized already, one without anything to
// quantize, and stacked experts of other families than gpt-oss, by name.
Result<QuantizePlan> plan_quantization(const Checkpoint& checkpoint, const nlohmann::ordered_json& config,
                                       QuantizeType type, QuantizeWhat what, int64_t max_shard_bytes);

}  // namespace nibble
