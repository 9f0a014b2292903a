// Routed experts in NVFP4, MXFP4, q4 or BF16 on the tensor cores. For few rows an expert: one persistent
// kernel from the normed input to the combined output; up to kFewTokens rows it routes and groups itself,
// before more of them runs one small kernel that does it. For many rows an expert, and for any number in
// BF16: moe_many.h.
//
// Arithmetic: W4A16. A weight (code times block scale; of q4 the code, whose scale goes on the block's sum)
// is exact in bfloat16; an activation goes in as the sum of two bfloat16 numbers, of which the second is what
// the first lost (16 bits of mantissa in all); products and sums are float32; the tensor scale is applied to
// the sum. The activation between the two products likewise.
//
// Invariance: a row's sums run over K in one order (up to eight parts of K, each in order, then their sum),
// whatever the rows beside it; the experts of a token are added in the order of a.
#pragma once

#include <cuda_runtime_api.h>

#include <climits>
#include <cstdint>
#include <string>

#include "ops/activation.h"
#include "ops/cuda/moe_tiles.h"
#include "ops/cuda/tile_linear.h"
#include "ops/op_args.h"
#include "quant/matrix.h"

namespace nibble::cuda {

inline constexpr int kMaxExperts = 1024;
inline constexpr int kFewTokens = 8;  // that the layer's kernel routes and groups itself at most

// One expert, repacked (moe_tiles.h). Biases: null for none.
struct PackedExpert {
  const uint8_t* gate_up = nullptr;  // [I/16 pairs of tiles][D/128 chunks], both rounded up
  const uint8_t* down = nullptr;     // [D/32 pairs of tiles][I/128 chunks]
  float gate_scale = 1, up_scale = 1, down_scale = 1;
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
};

// A matrix as it is on disk, in device memory: codes u8 [N, K/2], block scales [N, K/block_columns()].
struct DiskMatrix {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
};

struct MoeShape {
  int experts = 0, chosen = 0;
  int model = 0, width = 0;          // D, I
  TileKind kind = TileKind::kNvfp4;  // not kBF16In12
  int most_few = INT_MAX;            // tokens; more of them, and experts have many rows each (with_many())

  NIBBLE_HOST_DEVICE int model_chunks() const { return (model + 127) / 128; }
  NIBBLE_HOST_DEVICE int width_chunks() const { return (width + 127) / 128; }
  int64_t gate_up_bytes() const;  // of one expert, repacked
  int64_t down_bytes() const;
};

// The shape where has_wgmma(), which kernels for many rows an expert take: one pass of the kernel for few
// rows is enough for an even choice of up to most_few tokens, and two of it take longer than one of that for
// many (docs/lab/2026-11-30-experts-on-the-gpu.md).
MoeShape with_many(MoeShape shape);

// What a measured most_few is kept under.
std::string crossover_key(const std::string& device, const MoeShape& shape);

// An expert that every row goes through, from what its gate and up gave on: the activation, into gate, and
// the last product, which is added behind the sum of the routed ones. width 0: there is none.
struct SharedDown {
  // [D, W] in BF16 (tile_linear.h), REQUIRES can_join_experts(); null: no product here, and a kernel behind
  // this one reads gate.
  const uint8_t* tiles = nullptr;
  float scale = 1;
  int width = 0;          // W
  float* gate = nullptr;  // [T, W], overwritten
  int64_t gate_stride = 0;
  const float* up = nullptr;  // [T, W]
  int64_t up_stride = 0;
};

struct MoeDecodeArgs {
  MoeShape shape;
  const PackedExpert* experts = nullptr;  // [E], in device memory
  ActivationSpec activation;
  int tokens = 0;
  const float* x = nullptr;  // [T, D]
  int64_t x_stride = 0;
  const int32_t* ids = nullptr;  // [T, A], each in [0, E)
  int64_t ids_stride = 0;
  const float* weights = nullptr;  // [T, A]
  int64_t weights_stride = 0;
  float* out = nullptr;  // [T, D], overwritten, or where `adds`, added to
  int64_t out_stride = 0;
  bool adds = false;
  SharedDown shared;
  void* workspace = nullptr;  // moe_decode_workspace_bytes()
  // Host; null: ids and weights are there. Else they come of this, in the launch that groups.
  const RouteArgs* route = nullptr;
  uint32_t* handed = nullptr;  // [moe_decode_handed()], zero, and zero again afterwards
};

// Shared memory that a block needs at least, and that of the layout with room for routing and grouping.
int64_t moe_decode_shared_bytes(TileKind kind);
int64_t moe_decode_roomy_bytes(TileKind kind);
// Which of the two it is where a block can have `shared_bytes`.
bool moe_decode_is_roomy(TileKind kind, int64_t shared_bytes);
int64_t moe_decode_workspace_bytes(const MoeShape& shape, int tokens);
int64_t moe_decode_handed(const MoeShape& shape, int tokens);

// Whether a shared expert can be done with the routed ones.
bool can_join_experts(TileKind down, int64_t tokens);

// Writes the tiles of gate and up, or of down, of one expert.
cudaError_t repack_gate_up(const MoeShape& shape, DiskMatrix gate, DiskMatrix up, uint8_t* to,
                           cudaStream_t stream);
cudaError_t repack_down(const MoeShape& shape, DiskMatrix down, uint8_t* to, cudaStream_t stream);

// The same of any matrix in such tiles (tile_linear.h).
cudaError_t make_4bit_tiles(TileKind kind, const uint8_t* codes, const uint8_t* scales, int n, int k,
                            uint8_t* to, cudaStream_t stream);

// Launches the layer on `stream`; needs no host round trip and can be captured in a graph.
cudaError_t moe_decode(const MoeDecodeArgs& args, cudaStream_t stream);

}  // namespace nibble::cuda
