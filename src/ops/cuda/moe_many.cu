// The two products of routed experts with many rows each (moe_many.h).
//
// A task is eight pairs of tiles of one expert (128 rows of gate and as many of up, or 256 of down) times the
// rows of a block, 8, 16 or 32 of them. Of a block's three warpgroups one feeds a ring of stages (a chunk of
// those weights, and the same columns of the rows), and two multiply, four pairs each: a warp decodes both
// tiles of a pair into registers, and so has gate and up of the same elements.
//
// The order of a sum is that of moe_layer.cuh: K in up to eight parts (Split), each from 0, the products of a
// row's high and of its low parts apart; then high + low of the first part, of the second, ...
#include <algorithm>

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear_tiles.cuh"
#include "ops/cuda/moe_layer.cuh"
#include "ops/cuda/moe_many.h"
#include "ops/cuda/moe_products.cuh"
#include "ops/cuda/wgmma.cuh"

namespace nibble::cuda {
namespace {

constexpr int kManyGroups = 2, kMultiplying = 4 * kManyGroups, kManyThreads = kMultiplying * 32 + 128;
constexpr int kPairs = kMultiplying, kFeeders = 4;

template <TileKind kKind>
struct ManyLayout {
  static constexpr int kStages = kKind == TileKind::kBF16 ? 2 : 6;
  static constexpr int kWeightBytes = kPairs * chunk_bytes(kKind);
  static constexpr int kStageBytes = kWeightBytes + kManyRows * kManyRowBytes;
  static constexpr int kBytes = kStages * kStageBytes + 2 * kStages * 8;
};

// Where a pair of columns c, c + 1 (c even) of row `row`, high parts, lies among the rows of a block, in
// words; the low parts are four words further. `rows`: that the block has room for.
template <TileKind kKind>
__device__ inline int64_t many_place(int rows, int row, int c) {
  const int in_chunk = c % kChunkColumns, eight = in_chunk % 4 / 2;
  constexpr bool kIsQ4 = kKind == TileKind::kQ4;  // word_column
  const int step = (kIsQ4 ? in_chunk / 32 * 8 : 0) + in_chunk % (kIsQ4 ? 8 : 32);
  const int q = kIsQ4 ? in_chunk / 8 % 4 : in_chunk / 32;
  return ((static_cast<int64_t>(c / kChunkColumns) * 16 + step / 4 * 2 + eight) * 2 * rows + 2 * row) * 4 + q;
}

// The rows of every block in the order that its products want: grid (blocks, some). A warp does eight pieces
// (a step's eight) of four rows at a time: of neighbouring lanes each stores one part of both their pieces,
// so that eight lanes fill a line.
template <TileKind kKind>
__global__ void many_rows(MoeDecodeArgs a, Workspace w) {
  after_kernel_before();
  const int b = static_cast<int>(blockIdx.x);
  if (b >= *w.blocks) return;
  const RowBlock block = w.block[b];
  const int rows = many_rows_of(block.count), lane = static_cast<int>(threadIdx.x) % 32, part = lane % 2;
  auto* const to = reinterpret_cast<uint4*>(w.many_x + many_first(block.first, b) * a.shape.model_chunks() *
                                                           kManyRowBytes);
  const int token_of_lane = w.row_token[block.first + min(lane, block.count - 1)];
  const bool vectors = a.shape.model % 2 == 0 && a.x_stride % 2 == 0 && is_aligned(a.x);
  const int pieces = a.shape.model_chunks() * 16, step = static_cast<int>(gridDim.y * blockDim.x) / 4;
  for (int first = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) / 32 * 8; first < pieces;
       first += step) {
    const int even = first + lane / 8 * 2, piece = even + part;
    const int c = piece / 16 * kChunkColumns + word_column(kKind, 0, piece % 16 / 4) + piece % 4 * 2;
    uint4* const at = to + static_cast<int64_t>(even) * 2 * rows + part;
    for (int four = 0; four < block.count; four += 4) {
      const int row = four + lane / 2 % 4;
      const float* x = a.x + __shfl_sync(~0u, token_of_lane, row) * a.x_stride;
      uint32_t high[4], low[4];
      float2 pairs[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        pairs[q] = load_two(x, c + word_column(kKind, q, 0), a.shape.model, vectors);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        split(pairs[q].x, pairs[q].y, high[q], low[q]);
        const uint32_t other = __shfl_xor_sync(~0u, part == 0 ? low[q] : high[q], 1);
        if (part == 0) {
          low[q] = other;
        } else {
          high[q] = other;
        }
      }
      if (row < block.count) {  // both of this lane's part: the even piece, and the odd
        at[2 * row] = {high[0], high[1], high[2], high[3]};
        at[2 * rows + 2 * row] = {low[0], low[1], low[2], low[3]};
      }
    }
  }
}

struct ManyTask {
  RowBlock block;
  int index, pair, pairs;  // of the block, and its first pair of tiles of so many
};

template <bool kDown>
struct ManyTasks {
  int all, of_block;
  __device__ ManyTasks(const MoeDecodeArgs& a, const Workspace& w)
      : of_block((tiles_of(a.shape, kDown) + kPairs - 1) / kPairs) {
    all = *w.blocks * of_block;
  }
  // Of a task behind the last: the last.
  __device__ ManyTask at(const MoeDecodeArgs& a, const Workspace& w, int i) const {
    i = min(i, all - 1);
    const int block = i / of_block, pair = i % of_block * kPairs;
    return {w.block[block], block, pair, min(kPairs, tiles_of(a.shape, kDown) - pair)};
  }
};

// What finishing a task takes, asked for before its products.
struct ManyFinish {
  float scale, up_scale;
  const float *bias, *up_bias;
  __device__ ManyFinish(const MoeDecodeArgs& a, const ManyTask& task, bool down, float unscale) {
    const PackedExpert& expert = a.experts[task.block.expert];
    scale = (down ? expert.down_scale : expert.gate_scale) * unscale, up_scale = expert.up_scale * unscale;
    bias = down ? expert.down_bias : expert.gate_bias, up_bias = expert.up_bias;
  }
};

// What becomes of the sums of a pair: of token 4 j + q, rows g (sums[tile][2 j]) and g + 8 of both its tiles.
template <TileKind kKind, bool kDown, int kRows>
__device__ inline void finish_many(const MoeDecodeArgs& a, const Workspace& w, const ManyTask& task,
                                   const ManyFinish& f, int pair, const float (&sums)[2][kRows / 2]) {
  const MoeShape& s = a.shape;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, q = lane % 4;
  if constexpr (kDown) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        const int n = pair * 32 + tile * 16 + i % 2 * 8 + g, row = i / 2 * 4 + q;
        if (row >= task.block.count || n >= s.model) continue;
        float value = sums[tile][i] * f.scale;
        if (f.bias != nullptr) value += f.bias[n];
        w.many_products[static_cast<int64_t>(task.block.first + row) * s.model + n] = value;
      }
    }
  } else {
    auto* const to = reinterpret_cast<uint32_t*>(w.many_h + many_first(task.block.first, task.index) *
                                                                s.width_chunks() * kManyRowBytes);
#pragma unroll 1
    for (int i = 0; i < kRows / 2 && i / 2 * 4 < task.block.count; ++i) {
      float gate = 0, up = 0;
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) {
        if (i == j) gate = sums[0][j] * f.scale, up = sums[1][j] * f.up_scale;
      }
      const int column = pair * 16 + i % 2 * 8 + g, row = i / 2 * 4 + q;
      __nv_bfloat162 parts = {};
      if (row < task.block.count && column < s.width) {
        if (f.bias != nullptr) gate += f.bias[column];
        if (f.up_bias != nullptr) up += f.up_bias[column];
        split(activated(a.activation, gate, up), parts.x, parts.y);
      }
      // A word is a part of two neighbouring columns: the lane of the first makes that of the high parts.
      const uint32_t own = *reinterpret_cast<const uint32_t*>(&parts);
      const uint32_t other = __shfl_xor_sync(~0u, own, 4);
      const uint32_t word = g % 2 == 0 ? __byte_perm(own, other, 0x5410) : __byte_perm(other, own, 0x7632);
      if (row < task.block.count) to[many_place<kKind>(kRows, row, column / 2 * 2) + g % 2 * 4] = word;
    }
  }
}

// The weights of a warp's pair of tiles in a chunk: what decode_word gives of a word.
template <TileKind kKind>
struct WordsOf {
  Codes<kKind> codes;
  Scales scales;
  __device__ explicit WordsOf(const uint8_t* chunk)
      : codes(load_codes<kKind>(chunk)), scales(scales_of<kKind>(codes)) {}
  __device__ void decode(int v, int tile, uint32_t (&weights)[2][4]) const {
    decode_word<kKind>(codes, scales, v, tile, weights);
  }
};
template <>
struct WordsOf<TileKind::kBF16> {
  const uint4* lane;
  __device__ explicit WordsOf(const uint8_t* chunk)
      : lane(reinterpret_cast<const uint4*>(chunk) + threadIdx.x % 32) {}
  __device__ void decode(int v, int tile, uint32_t (&weights)[2][4]) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 operand = lane[(tile * 8 + v * 2 + m) * 32];
      weights[0][2 * m] = operand.x, weights[1][2 * m] = operand.y;
      weights[0][2 * m + 1] = operand.z, weights[1][2 * m + 1] = operand.w;
    }
  }
};

// By a warp, of a warpgroup that has four pairs.
template <TileKind kKind, bool kDown, int kRows>
__device__ inline void multiply_many(const MoeDecodeArgs& a, const Workspace& w, const ManyTask& task,
                                     const uint8_t* shared, Ring<ManyLayout<kKind>::kStages>& ring) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = Tiles<kKind>;
  using L = ManyLayout<kKind>;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Split k(a.shape, kDown);
  const ManyFinish finish(a, task, kDown, unscale(kKind));
  float products[2][kRows] = {}, sums[2][kRows / 2] = {};
  float of_part[2][T::kScalesSums ? kRows / 2 : 1] = {};
  // The operands of a word stay while they are multiplied, and the next come to others meanwhile.
  constexpr int kSets = 2;
  uint32_t weights[kSets][2][2][4];
  constexpr bool kGivesBackLate = L::kStages > 2;
  int previous = -1;  // stage
  for (int part = 0; part < k.parts; ++part) {
    uint32_t add = 0;
    int chunk = part;
    do {  // every part has some
      ring.wait_full();
      const uint8_t* const stage = shared + ring.place * L::kStageBytes;
      const uint64_t rows = operand(stage + L::kWeightBytes, 2 * kRows * 16, 128);
      const WordsOf<kKind> words(stage + warp * chunk_bytes(kKind));
      auto multiply = [&](int v, int m, int tile, const uint32_t(&o)[2][4], uint32_t adds) {
        wgmma(products[tile], o[0][2 * m], o[1][2 * m], o[0][2 * m + 1], o[1][2 * m + 1],
              operand_at(rows, (v * 2 + m) * 2 * 2 * kRows * 16), adds);
      };
      if constexpr (T::kScalesSums) {
        // While a tile's products of a block run, those of the other are added up.
        auto add_up = [&](int tile, int v) {
          wgmma_settled(products[tile]);
          add_both_parts<kRows / 2>(words.codes.scales[tile], v, products[tile], of_part[tile]);
        };
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int v = i / 2, tile = i % 2;
          words.decode(v, tile, weights[0][tile]);
          wgmma_begin();
#pragma unroll
          for (int m = 0; m < 2; ++m) multiply(v, m, tile, weights[0][tile], m);
          wgmma_commit();
          if (i == 0) continue;
          wgmma_wait<1>();
          add_up(1 - tile, (i - 1) / 2);
        }
        wgmma_wait<0>();
        add_up(1, 3);
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          auto& of_word = weights[v % kSets];
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) words.decode(v, tile, of_word[tile]);
          wgmma_begin();
#pragma unroll
          for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
              multiply(v, m, tile, of_word[tile], v == 0 && m == 0 ? add : 1);
          }
          wgmma_commit();
          wgmma_wait<kSets - 1>();
        }
      }
      // A branch between products would make them wait for each other, so this one is given back late.
      if (kGivesBackLate && previous >= 0) warp_arrive(ring.empty + previous);
      if constexpr (!kGivesBackLate) {
        wgmma_wait<0>();
        warp_arrive(ring.empty + ring.place);
      }
      add = 1;
      previous = ring.place;
      ring.advance();
    } while ((chunk += k.parts) < k.chunks);
    wgmma_wait<0>();
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      wgmma_settled(products[tile]);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        float both;
        if constexpr (T::kScalesSums) {
          both = of_part[tile][i], of_part[tile][i] = 0;
        } else {
          both = products[tile][2 * i] + products[tile][2 * i + 1];
        }
        sums[tile][i] = part == 0 ? both : sums[tile][i] + both;
      }
    }
  }
  if (kGivesBackLate) warp_arrive(ring.empty + previous);
  if (warp < task.pairs) finish_many<kKind, kDown, kRows>(a, w, task, finish, task.pair + warp, sums);
#endif
}

template <TileKind kKind, bool kDown>
__global__ void __launch_bounds__(kManyThreads, 1)
    many_kernel(const __grid_constant__ MoeDecodeArgs a, const __grid_constant__ Workspace w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = ManyLayout<kKind>;
  constexpr int kChunk = chunk_bytes(kKind), kStages = L::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + kStages * L::kStageBytes);
  uint64_t* const empty = full + kStages;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(full + i, kFeeders), barrier_init(empty + i, kMultiplying * kWarpArrivals);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_wait();
  dependency_launch();
  const ManyTasks<kDown> tasks(a, w);
  if (warp >= kMultiplying) {
    fewer_registers<72>();
    const int feeder = warp - kMultiplying;
    if (lane == 0) {
      const uint64_t weights_policy = evict_first_policy(), rows_policy = normal_policy();
      const Split k(a.shape, kDown);
      int stage = 0;
      uint32_t parity = 1;
      ManyTask next = tasks.at(a, w, static_cast<int>(blockIdx.x));  // asked for a task ahead
      for (int i = static_cast<int>(blockIdx.x); i < tasks.all; i += static_cast<int>(gridDim.x)) {
        const ManyTask task = next;
        next = tasks.at(a, w, i + static_cast<int>(gridDim.x));
        const int rows_bytes = many_rows_of(task.block.count) * kManyRowBytes;
        const uint8_t* const weights =
            (kDown ? task.block.down : task.block.gate_up) + int64_t{task.pair} * k.chunks * kChunk;
        const uint8_t* const rows = (kDown ? w.many_h : w.many_x) +
                                    many_first(task.block.first, task.index) * k.chunks * kManyRowBytes;
        for (int part = 0; part < k.parts; ++part) {
          for (int chunk = part; chunk < k.chunks; chunk += k.parts) {
            barrier_wait(empty + stage, parity);
            uint8_t* const to = shared + stage * L::kStageBytes;
            int pairs = 0;
            for (int p = feeder; p < task.pairs; p += kFeeders) ++pairs;
            barrier_expect(full + stage, pairs * kChunk + (feeder == 0 ? rows_bytes : 0));
            for (int p = feeder; p < task.pairs; p += kFeeders)
              bulk_copy(to + p * kChunk, weights + (int64_t{p} * k.chunks + chunk) * kChunk, kChunk,
                        full + stage, weights_policy);
            if (feeder == 0)
              bulk_copy(to + L::kWeightBytes, rows + int64_t{chunk} * rows_bytes, rows_bytes, full + stage,
                        rows_policy);
            if (++stage == kStages) stage = 0, parity ^= 1;
          }
        }
      }
    }
    __syncwarp();
  } else {
    more_registers<216>();
    Ring<kStages> ring{full, empty};
    ManyTask next = tasks.at(a, w, static_cast<int>(blockIdx.x));
    for (int i = static_cast<int>(blockIdx.x); i < tasks.all; i += static_cast<int>(gridDim.x)) {
      const ManyTask task = next;
      next = tasks.at(a, w, i + static_cast<int>(gridDim.x));
      const int rows = many_rows_of(task.block.count);
      if (rows == 8) {
        multiply_many<kKind, kDown, 8>(a, w, task, shared, ring);
      } else if (rows == 16) {
        multiply_many<kKind, kDown, 16>(a, w, task, shared, ring);
      } else {
        multiply_many<kKind, kDown, 32>(a, w, task, shared, ring);
      }
    }
  }
#endif
}

// A token's experts, added in the order of a; some are asked for at once.
__global__ void many_sums(MoeDecodeArgs a, Workspace w) {
  after_kernel_before();
  constexpr int kAhead = 5;
  const int t = static_cast<int>(blockIdx.x), d = a.shape.model, chosen = a.shape.chosen;
  const int* const rows = w.grouped_row + t * chosen;
  float* const out = a.out + t * a.out_stride;
  const bool vectors = d % 4 == 0 && is_aligned(out);
  const int c = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (c >= d) return;
  float4 sum = {};
  auto add = [](float4& to, const float4& x) { to.x += x.x, to.y += x.y, to.z += x.z, to.w += x.w; };
  for (int first = 0; first < chosen; first += kAhead) {
    float4 products[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t row = rows[min(first + j, chosen - 1)];
      products[j] = load_four(w.many_products + row * d, c, d, vectors);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j < chosen) add(sum, times(products[j], a.weights[t * a.weights_stride + first + j]));
    }
  }
  if (a.adds) {
    const float4 before = load_four(out, c, d, vectors);
    sum = {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w};
  }
  if (vectors) {
    *reinterpret_cast<float4*>(out + c) = sum;
  } else {
    store_four(out, c, d, sum);
  }
}

template <TileKind kKind, bool kDown>
cudaError_t launch_product(const MoeDecodeArgs& args, const Workspace& w, int multiprocessors,
                           cudaStream_t stream) {
  constexpr int kBytes = ManyLayout<kKind>::kBytes;
  static_assert(kBytes <= kMaxSharedBytes);
  const auto kernel = many_kernel<kKind, kDown>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) launch_early(kernel, multiprocessors, kManyThreads, kBytes, stream, args, w);
  return error;
}

template <TileKind kKind>
cudaError_t launch(const MoeDecodeArgs& args, int multiprocessors, cudaStream_t stream) {
  const Workspace w = workspace_at(static_cast<char*>(args.workspace), args.shape, args.tokens, true);
  const MoeShape& s = args.shape;
  constexpr unsigned kElements = 256;
  launch_early(many_rows<kKind>,
               dim3(static_cast<unsigned>(max_blocks(s.experts, args.tokens * s.chosen, kManyRows)),
                    static_cast<unsigned>(s.model_chunks() + 3) / 4),  // a warp half a chunk
               kElements, 0, stream, args, w);
  cudaError_t error = launch_product<kKind, false>(args, w, multiprocessors, stream);
  if (error == cudaSuccess) error = launch_product<kKind, true>(args, w, multiprocessors, stream);
  if (error != cudaSuccess) return error;
  launch_early(many_sums,
               dim3(static_cast<unsigned>(args.tokens), (static_cast<unsigned>(s.model) + 1023) / 1024),
               kElements, 0, stream, args, w);
  return cudaGetLastError();
}

}  // namespace

MoeShape with_many(MoeShape shape) {
  shape.most_few = std::max(kMostJoined, kMaxRows * shape.experts / shape.chosen);
  if (shape.kind == TileKind::kBF16) shape.most_few = 0;
  return shape;
}

cudaError_t moe_many(const MoeDecodeArgs& args, int multiprocessors, cudaStream_t stream) {
  switch (args.shape.kind) {
    case TileKind::kBF16:
      return launch<TileKind::kBF16>(args, multiprocessors, stream);
    case TileKind::kNvfp4:
      return launch<TileKind::kNvfp4>(args, multiprocessors, stream);
    case TileKind::kMxfp4:
      return launch<TileKind::kMxfp4>(args, multiprocessors, stream);
    case TileKind::kQ4:
      return launch<TileKind::kQ4>(args, multiprocessors, stream);
    case TileKind::kBF16In12:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace nibble::cuda
