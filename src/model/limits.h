// The largest sizes that a config may ask for. They bound what a hostile config can make us compute or
// allocate; each is far above any released model.
#pragma once

#include <cstdint>

#include "ops/limits.h"

namespace nibble::limits {

inline constexpr int64_t kWidth = 1 << 20;  // D, I
inline constexpr int64_t kVocab = 1 << 24;
inline constexpr int64_t kLayers = 1 << 12;
inline constexpr int64_t kHeads = 1 << 12;
inline constexpr int64_t kHeadDim = kMaxHeadDim;
inline constexpr int64_t kStreams = kMaxStreams;
inline constexpr int64_t kExperts = 1 << 14;
inline constexpr int64_t kPositions = 1 << 28;

}  // namespace nibble::limits
