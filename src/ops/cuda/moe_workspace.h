// What the kernels of moe_decode() share: the row blocks, and where the workspace holds what.
#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/moe_decode.h"

namespace nibble::cuda {

inline constexpr int kTokensOfTile = 4;                     // an MMA's 8 columns: both parts of four tokens
inline constexpr int kMaxTiles = 2;                         // column tiles of one pass over the weights
inline constexpr int kMaxRows = kTokensOfTile * kMaxTiles;  // rows of an expert in one pass

// Where an expert has many rows (moe_many.h): those of a pass, and how they lie. A block of them has room for
// 8, 16 or 32; a chunk of a row's columns is kManyRowBytes, [8 steps][2][rows][2 parts][16 bytes], with the
// columns of a step as in linear_tiles.cuh.
inline constexpr int kManyRows = 32, kManyRowBytes = 512;
inline constexpr int kMostJoined = 64;  // tokens whose shared expert can_join_experts()
inline bool uses_many(const MoeShape& shape, int64_t tokens) { return tokens > shape.most_few; }
NIBBLE_HOST_DEVICE inline int many_rows_of(int count) {
  return count <= 8 ? 8 : count <= 16 ? 16 : kManyRows;
}
// Where block `block` begins, whose first row is `first`: all before it have room for less than twice their
// rows, or for eight.
NIBBLE_HOST_DEVICE inline int64_t many_first(int first, int block) { return 2 * int64_t{first} + 8 * block; }

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

// A pair of tiles of a row block; the end of all is tile 0 of the block after the last.
struct Place {
  int block, tile;
};

// Where the workspace holds what, all of it from the kernel that groups.
struct Workspace {
  // [multiprocessors + 1] where each multiprocessor's share of the pairs of tiles of gate and up, or of down,
  // of all blocks begins.
  Place *gate_up_share, *down_share;
  int* blocks;       // [1] how many row blocks there are
  RowBlock* block;   // [max blocks]
  int* row_token;    // [R] token of a grouped row
  int* grouped_row;  // [R] the inverse
  __nv_bfloat16* x;  // [T, 2, D'] the input's two parts, in operand_place; D', I': rounded up to 128
  // Of uses_many(): rows of x and of h by blocks; the products of down [R, D].
  uint8_t *many_x, *many_h;
  float* many_products;
  int64_t bytes;
};

NIBBLE_HOST_DEVICE inline int max_blocks(int experts, int rows, int rows_of_block = kMaxRows) {
  return rows / rows_of_block + (rows < experts ? rows : experts);
}

NIBBLE_HOST_DEVICE inline Workspace workspace_at(char* base, const MoeShape& s, int tokens, bool many) {
  int64_t at = 0;
  const int64_t rows = static_cast<int64_t>(tokens) * s.chosen;
  const int64_t d = int64_t{s.model_chunks()} * 128;
  auto take = [&](int64_t bytes) {
    char* p = base + at;
    at += (bytes + 255) / 256 * 256;
    return p;
  };
  Workspace w;
  const int64_t blocks = max_blocks(s.experts, static_cast<int>(rows));
  constexpr int64_t kShares = (kMaxMultiprocessors + 1) * int64_t{sizeof(Place)};
  w.gate_up_share = reinterpret_cast<Place*>(take(kShares));
  w.down_share = reinterpret_cast<Place*>(take(kShares));
  w.blocks = reinterpret_cast<int*>(take(4));
  w.block = reinterpret_cast<RowBlock*>(take(blocks * static_cast<int64_t>(sizeof(RowBlock))));
  w.row_token = reinterpret_cast<int*>(take(rows * 4));
  w.grouped_row = reinterpret_cast<int*>(take(rows * 4));
  w.x = reinterpret_cast<__nv_bfloat16*>(take(many ? 0 : tokens * 2 * d * 2));
  const int64_t room =
      many_first(static_cast<int>(rows), max_blocks(s.experts, static_cast<int>(rows), kManyRows));
  w.many_x = reinterpret_cast<uint8_t*>(take(many ? room * s.model_chunks() * kManyRowBytes : 0));
  w.many_h = reinterpret_cast<uint8_t*>(take(many ? room * s.width_chunks() * kManyRowBytes : 0));
  w.many_products = reinterpret_cast<float*>(take(many ? rows * s.model * 4 : 0));
  w.bytes = at;
  return w;
}

// What multiprocessors tell each other, in args.handed: zero between launches.
//
// A word (an id, of h, of a product) lies complemented, and 0 says that it is not there yet: whoever needs it
// asks for the word itself until it is. So there is no counter between the two, for which the one had to wait
// for its stores, and the other for the counter before its loads. Every word tells of itself alone, and
// nothing depends on the order in which they arrive.
struct Handed {
  uint32_t* done;     // multiprocessors that have all that they need of h
  uint32_t* ids;      // [R] experts that the routing kernel chose
  uint32_t* h;        // [R, 2, I'/2] the activation's two parts, pairs of columns, in operand_place
  uint32_t* partial;  // [R, D'] products of down, float32
  uint32_t* shared;   // [T, D'] those of the shared expert
  int64_t words;
};
NIBBLE_HOST_DEVICE inline Handed handed_at(uint32_t* base, const MoeShape& s, int tokens) {
  constexpr int kLine = 32;  // of memory
  const int64_t rows = static_cast<int64_t>(tokens) * s.chosen;
  const int64_t h = kLine + (rows + kLine - 1) / kLine * kLine, partial = h + rows * s.width_chunks() * 128;
  const int64_t d = int64_t{s.model_chunks()} * 128, shared = partial + rows * d;
  return {base, base + kLine, base + h, base + partial, base + shared, shared + tokens * d};
}

// Rows in the order of experts, row blocks, and the two parts of x.
cudaError_t group_rows(const MoeDecodeArgs& args, bool many, int multiprocessors, cudaStream_t stream);

}  // namespace nibble::cuda
