// What the kernels of moe_decode() share: the row blocks, and where the workspace holds what.
#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/moe_decode.h"

namespace nibble::cuda {

inline constexpr int kTokensOfTile = 4;                     // an MMA's 8 columns: both parts of four tokens
inline constexpr int kMaxTiles = 2;                         // column tiles of one pass over the weights
inline constexpr int kMaxRows = kTokensOfTile * kMaxTiles;  // rows of an expert in one pass

inline constexpr int kMaxMultiprocessors = 1024;

// Pairs of weight tiles of an expert.
NIBBLE_HOST_DEVICE inline int tiles_of(const MoeShape& s, bool down) {
  return down ? s.model_chunks() * 4 : s.width_chunks() * 8;
}

// Relative times of a pass over an expert's weights with one tile of tokens, and with two.
inline constexpr int kOneTileCost = 1024, kTwoTilesCost = 1152;

// Some rows of one expert: what one pass over its weights serves.
struct RowBlock {
  const uint8_t *gate_up, *down;  // the expert's weights
  int expert, first, count;       // rows of the grouped order
};

// Where the workspace holds what. What is before h comes from the kernel that groups.
struct Workspace {
  // [multiprocessors + 1] where each multiprocessor's share of the pairs of tiles of gate and up, or of down,
  // of all blocks begins.
  int *gate_up_share, *down_share;
  int* blocks;       // [1] how many row blocks there are
  RowBlock* block;   // [max blocks]
  int* row_token;    // [R] token of a grouped row
  int* grouped_row;  // [R] the inverse
  __nv_bfloat16* x;  // [T, 2, D'] the input's two parts, in operand_place; D', I': rounded up to 128
  __nv_bfloat16* h;  // [R, 2, I'] the activation's two parts, likewise
  float* partial;    // [R, D'] products of down
  int64_t bytes;
};

NIBBLE_HOST_DEVICE inline int max_blocks(int experts, int rows) {
  return rows / kMaxRows + (rows < experts ? rows : experts);
}

NIBBLE_HOST_DEVICE inline Workspace workspace_at(char* base, const MoeShape& s, int tokens) {
  int64_t at = 0;
  const int64_t rows = static_cast<int64_t>(tokens) * s.chosen;
  const int64_t d = (s.model + 127) / 128 * 128, i = (s.width + 127) / 128 * 128;
  auto take = [&](int64_t bytes) {
    char* p = base + at;
    at += (bytes + 255) / 256 * 256;
    return p;
  };
  Workspace w;
  const int64_t blocks = max_blocks(s.experts, static_cast<int>(rows));
  w.gate_up_share = reinterpret_cast<int*>(take((kMaxMultiprocessors + 1) * 4));
  w.down_share = reinterpret_cast<int*>(take((kMaxMultiprocessors + 1) * 4));
  w.blocks = reinterpret_cast<int*>(take(4));
  w.block = reinterpret_cast<RowBlock*>(take(blocks * static_cast<int64_t>(sizeof(RowBlock))));
  w.row_token = reinterpret_cast<int*>(take(rows * 4));
  w.grouped_row = reinterpret_cast<int*>(take(rows * 4));
  w.x = reinterpret_cast<__nv_bfloat16*>(take(tokens * 2 * d * 2));
  w.h = reinterpret_cast<__nv_bfloat16*>(take(rows * 2 * i * 2));
  w.partial = reinterpret_cast<float*>(take(rows * d * 4));
  w.bytes = at;
  return w;
}

// What multiprocessors count for each other, in args.counters, a line for each. Whoever is last to need them
// makes them zero again.
struct Counters {
  uint32_t* routed;    // rows that are routed
  uint32_t* finished;  // down tasks of all blocks; then the multiprocessors that know it
  uint32_t* ready;     // [max blocks] gate_up tasks of a block
};
inline constexpr int kCountersOfLine = 32;
NIBBLE_HOST_DEVICE inline Counters counters_at(uint32_t* base) {
  return {base, base + kCountersOfLine, base + 2 * kCountersOfLine};
}

// Rows in the order of experts, row blocks, and the two parts of x.
cudaError_t group_rows(const MoeDecodeArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace nibble::cuda
