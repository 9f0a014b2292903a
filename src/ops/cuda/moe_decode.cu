#include "ops/cuda/moe_decode.h"

#include <algorithm>

#include "ops/cuda/moe_tiles.h"
#include "ops/cuda/primitives.cuh"

namespace nibble::cuda {
namespace {

constexpr int kTokensOfTile = 4;                    // an MMA's 8 columns: both parts of four tokens
constexpr int kMaxTiles = 4;                        // column tiles of one pass over the weights
constexpr int kMaxRows = kTokensOfTile * kMaxTiles;  // rows of an expert in one pass
constexpr int kStages = 3;                          // chunks of a warp that are under way

// Some rows of one expert: what one pass over its weights serves.
struct RowBlock {
  int expert, first, count;  // rows of the grouped order
};

// Where the workspace holds what. The first part is zeroed or written by the grouping kernel.
struct Workspace {
  int* blocks;          // [1] how many row blocks there are
  RowBlock* block;      // [max blocks]
  int* row_token;       // [R] token of a grouped row
  int* row_pair;        // [R] t * A + a of a grouped row
  int* grouped_row;     // [R] the inverse
  uint32_t* ready;      // [max blocks] finished gate_up tasks of a block
  uint32_t* arrived;    // [T, D/32] experts that have written their part of an output
  __nv_bfloat16* x;     // [T, 2, D'] the input's two parts; D', I': rounded up to 128
  __nv_bfloat16* h;     // [R, 2, I'] the activation's two parts
  float* partial;       // [R, D'] products of down
  int64_t bytes;
};

__host__ __device__ inline int max_blocks(int experts, int rows) {
  return rows / kMaxRows + (rows < experts ? rows : experts);
}

__host__ __device__ inline Workspace workspace_at(char* base, const MoeShape& s, int tokens) {
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
  w.blocks = reinterpret_cast<int*>(take(4));
  w.block = reinterpret_cast<RowBlock*>(take(blocks * static_cast<int64_t>(sizeof(RowBlock))));
  w.row_token = reinterpret_cast<int*>(take(rows * 4));
  w.row_pair = reinterpret_cast<int*>(take(rows * 4));
  w.grouped_row = reinterpret_cast<int*>(take(rows * 4));
  w.ready = reinterpret_cast<uint32_t*>(take(blocks * 4));
  w.arrived = reinterpret_cast<uint32_t*>(take(tokens * (d / 32) * 4));
  w.x = reinterpret_cast<__nv_bfloat16*>(take(tokens * 2 * d * 2));
  w.h = reinterpret_cast<__nv_bfloat16*>(take(rows * 2 * i * 2));
  w.partial = reinterpret_cast<float*>(take(rows * d * 4));
  w.bytes = at;
  return w;
}

// ---- repacking

// One thread a word of codes: word j of lane (g, q), half h, tile, chunk, pair of tiles.
__global__ void repack_codes(DiskMatrix first, DiskMatrix second, bool down, int n, int k, int block,
                             uint8_t* to, int64_t words) {
  const int chunks = (k + 127) / 128;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < words;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int j = id % 4, lane = id / 4 % 32, half = id / 128 % 2, tile = id / 256 % 2;
    const int chunk = id / 512 % chunks;
    const int64_t pair = id / 512 / chunks;
    const DiskMatrix& m = !down && tile == 1 ? second : first;
    const int64_t row = (down ? pair * 32 + tile * 16 : pair * 16) + half * 8 + lane / 4;
    const int column = chunk * 128 + lane % 4 * 32 + j * 8;
    uint32_t codes = 0;
    if (row < n && column < k) {
      const uint8_t* from = m.codes + row * (k / 2) + column / 2;
      for (int b = 0; b < 4; ++b) codes |= static_cast<uint32_t>(from[b]) << (8 * b);
      // A negative scale is a positive one of negated codes.
      if (block == 16 && (m.scales[row * (k / 16) + column / 16] & 0x80) != 0) codes ^= 0x88888888u;
    }
    uint8_t* chunk_at = to + (pair * chunks + chunk) * chunk_bytes(block);
    reinterpret_cast<uint32_t*>(chunk_at + tile * kTileCodeBytes + half * 512 + lane * 16)[j] =
        place_codes(codes);
  }
}

// One thread a lane's scales of one tile and chunk.
__global__ void repack_scales(DiskMatrix first, DiskMatrix second, bool down, int n, int k, int block,
                              uint8_t* to, int64_t lanes) {
  const int chunks = (k + 127) / 128, each = 32 / block;
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < lanes;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int lane = id % 32, tile = id / 32 % 2, chunk = id / 64 % chunks;
    const int64_t pair = id / 64 / chunks;
    const DiskMatrix& m = !down && tile == 1 ? second : first;
    uint8_t* at = to + (pair * chunks + chunk) * chunk_bytes(block) + 2 * kTileCodeBytes +
                  tile * tile_scale_bytes(block) + lane * 2 * each;
    for (int half = 0; half < 2; ++half) {
      const int64_t row = (down ? pair * 32 + tile * 16 : pair * 16) + half * 8 + lane / 4;
      for (int b = 0; b < each; ++b) {
        const int column = chunk * 128 + lane % 4 * 32 + b * block;
        uint8_t scale = 0;
        if (row < n && column < k) scale = m.scales[row * (k / block) + column / block];
        at[half * each + b] = block == 16 ? scale & 0x7F : scale;
      }
    }
  }
}

cudaError_t repack(DiskMatrix first, DiskMatrix second, bool down, int n, int k, int block, uint8_t* to,
                   cudaStream_t stream) {
  const int rows = down ? 32 : 16;
  const int64_t chunks = static_cast<int64_t>((n + rows - 1) / rows) * ((k + 127) / 128);
  auto grid = [](int64_t work) { return static_cast<unsigned>(std::min<int64_t>((work + 255) / 256, 65535)); };
  repack_codes<<<grid(chunks * 512), 256, 0, stream>>>(first, second, down, n, k, block, to, chunks * 512);
  repack_scales<<<grid(chunks * 64), 256, 0, stream>>>(first, second, down, n, k, block, to, chunks * 64);
  return cudaGetLastError();
}

// ---- grouping

__device__ inline void split(float value, __nv_bfloat16& high, __nv_bfloat16& low) {
  high = __float2bfloat16_rn(value);
  low = __float2bfloat16_rn(value - __bfloat162float(high));
}

// Block 0: rows in the stable order of (expert, token), cut into row blocks; counters to zero. The others: the
// two parts of x.
__global__ void __launch_bounds__(1024) group_rows(MoeDecodeArgs a) {
  dependency_wait();
  dependency_launch();
  const MoeShape& s = a.shape;
  const Workspace w = workspace_at(static_cast<char*>(a.workspace), s, a.tokens);
  const int d = (s.model + 127) / 128 * 128;
  if (blockIdx.x > 0) {
    const int64_t count = static_cast<int64_t>(a.tokens) * d;
    const int64_t step = static_cast<int64_t>(gridDim.x - 1) * blockDim.x;
    for (int64_t id = (blockIdx.x - 1) * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < count;
         id += step) {
      const int64_t t = id / d;
      const int c = static_cast<int>(id % d);
      split(c < s.model ? a.x[t * a.x_stride + c] : 0.0f, w.x[t * 2 * d + c], w.x[(t * 2 + 1) * d + c]);
    }
    return;
  }
  const int rows = a.tokens * s.chosen, threads = static_cast<int>(blockDim.x), me = threadIdx.x;
  for (int i = me; i < a.tokens * (d / 32); i += threads) w.arrived[i] = 0;
  for (int i = me; i < max_blocks(s.experts, rows); i += threads) w.ready[i] = 0;
  // Thread by expert: how many rows, where its rows and blocks begin, which rows. Up to 1024 experts.
  __shared__ int rows_before[1024], blocks_before[1024];
  int count = 0;
  if (me < s.experts) {
    for (int t = 0; t < a.tokens; ++t) {
      for (int c = 0; c < s.chosen; ++c) count += a.ids[t * a.ids_stride + c] == me ? 1 : 0;
    }
  }
  const int blocks = (count + kMaxRows - 1) / kMaxRows;
  rows_before[me] = count;
  blocks_before[me] = blocks;
  for (int step = 1; step < threads; step *= 2) {
    __syncthreads();
    const int r = me >= step ? rows_before[me - step] : 0, b = me >= step ? blocks_before[me - step] : 0;
    __syncthreads();
    rows_before[me] += r;
    blocks_before[me] += b;
  }
  __syncthreads();
  if (me == threads - 1) *w.blocks = blocks_before[me];
  if (count == 0) return;
  int row = rows_before[me] - count;
  for (int b = 0; b < blocks; ++b) {
    w.block[blocks_before[me] - blocks + b] = {me, row + b * kMaxRows, min(kMaxRows, count - b * kMaxRows)};
  }
  for (int t = 0; t < a.tokens; ++t) {
    for (int c = 0; c < s.chosen; ++c) {
      if (a.ids[t * a.ids_stride + c] != me) continue;
      w.row_token[row] = t;
      w.row_pair[row] = t * s.chosen + c;
      w.grouped_row[t * s.chosen + c] = row++;
    }
  }
}

// ---- the layer

__device__ inline float activated(const ActivationSpec& spec, float gate, float up) {
  if (spec.kind != ActivationSpec::kSilu) {
    gate = fminf(gate, spec.limit);
    up = fminf(fmaxf(up, -spec.limit), spec.limit);
  }
  if (spec.kind == ActivationSpec::kGptOss) return gate / (1.0f + expf(-spec.alpha * gate)) * (up + 1.0f);
  return gate / (1.0f + expf(-gate)) * up;
}

// Eight codes of a row as four pairs of bfloat16, times 2^-126.
__device__ inline void decode(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;
  pairs[0] = word & kMask;
  pairs[1] = rotate_right(word, 3) & kMask;
  pairs[2] = rotate_right(word, 6) & kMask;
  // Sign, exponent and mantissa of the fourth pair go to three different distances; the copies do not meet.
  pairs[3] = ((word & 0x001B001Bu) * ((1u << 12) + (1u << 7) + (1u << 2))) & kMask;
}

// What the scales below leave to be done on the float32 sum: a weight comes out of the decoding times 2^-7.
constexpr float kUnscale = 128.0f;

// A block scale times 2^119 as a pair of equal bfloat16.
template <int kBlock>
__device__ inline uint32_t scale_pair(uint32_t scales, int byte) {
  if constexpr (kBlock == 16) {
    // e4m3 without its sign is a bfloat16 times 2^-120 when its bits start at 4: subnormals included.
    const uint32_t high = __byte_perm(scales, 0, 0x0404 | byte << 4 | byte << 12);
    constexpr uint32_t kTwoTo120 = 0x7B807B80u, kTwoTo119 = 0x7B007B00u;
    return mul_bf16x2(mul_bf16x2(high >> 4, kTwoTo120), kTwoTo119);
  } else {
    const uint32_t exponent = (scales >> (8 * byte) & 0xFF) + 119;
    return exponent << 7 | exponent << 23;
  }
}

// Chunk by chunk, a warp's weights come through its ring of stages: the tasks' chunks without a gap between tasks.
template <int kBlock>
struct Ring {
  static constexpr int kBytes = chunk_bytes(kBlock);
  uint8_t* stages;     // [kStages][kBytes] in shared memory
  uint64_t* barriers;  // [kStages]
  uint64_t policy;
  uint32_t head = 0;  // chunks asked for
  uint32_t tail = 0;  // chunks used

  __device__ void ask(const uint8_t* from) {  // by one lane
    const uint32_t stage = head++ % kStages;
    barrier_expect(barriers + stage, kBytes);
    bulk_copy(stages + stage * kBytes, from, kBytes, barriers + stage, policy);
  }
  __device__ const uint8_t* wait() {
    const uint32_t stage = tail % kStages;
    barrier_wait(barriers + stage, tail / kStages & 1);
    return stages + stage * kBytes;
  }
};

// The tasks of a pair of warps, in order: j = pair, pair + pairs, ... First all of gate_up, then all of down.
struct Tasks {
  int gate_up_tiles, down_tiles;  // pairs of tiles of an expert
  int gate_up, total;             // tasks
};

// Where the chunks of this warp's half of a task begin, and how many they are.
struct Half {
  const uint8_t* from;
  int first_chunk, chunks;
};

template <int kBlock>
__device__ inline Half half_of(const Tasks& tasks, const Workspace& w, const MoeDecodeArgs& a, int j, int half) {
  const bool down = j >= tasks.gate_up;
  const int at = down ? j - tasks.gate_up : j, tiles = down ? tasks.down_tiles : tasks.gate_up_tiles;
  const int tile = at % tiles;
  const PackedExpert& expert = a.experts[w.block[at / tiles].expert];
  const int chunks = ((down ? a.shape.width : a.shape.model) + 127) / 128, middle = (chunks + 1) / 2;
  const int first = half == 0 ? 0 : middle;
  return {(down ? expert.down : expert.gate_up) +
              (static_cast<int64_t>(tile) * chunks + first) * chunk_bytes(kBlock),
          first, half == 0 ? middle : chunks - middle};
}

// Asks for chunks, task after task, while there is room.
template <int kBlock>
struct Feeder {
  Half next = {nullptr, 0, 0};
  int j;

  __device__ void feed(Ring<kBlock>& ring, const Tasks& tasks, const Workspace& w, const MoeDecodeArgs& a,
                       int half, int pairs) {
    while (ring.head - ring.tail < kStages) {
      while (next.chunks == 0) {
        if (j >= tasks.total) return;
        next = half_of<kBlock>(tasks, w, a, j, half);
        j += pairs;
      }
      ring.ask(next.from);
      next.from += chunk_bytes(kBlock);
      --next.chunks;
    }
  }
};

// One task: sums[tile][n][4] of this warp's half of K. `rows`: elements of lane's column (its token and part) of
// each tile n, at column 0 of K; null: no such row.
template <int kBlock, int kTiles, class Feed>
__device__ inline void multiply(Ring<kBlock>& ring, Feed feed, int first_chunk, int chunks,
                                const __nv_bfloat16* const (&rows)[kTiles], float (&sums)[2][kTiles][4]) {
  const int lane = threadIdx.x % 32;
  constexpr int kScales = 32 / kBlock;  // of a row
  for (int c = 0; c < chunks; ++c) {
    const int column = (first_chunk + c) * kChunkColumns + lane % 4 * 32;
    uint32_t b[kTiles][8];
    auto load_b = [&](int part) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          uint4 bits = {0, 0, 0, 0};
          if (rows[n] != nullptr) {
            bits = *reinterpret_cast<const uint4*>(rows[n] + column + part * 16 + v * 8);
          }
          b[n][4 * v] = bits.x, b[n][4 * v + 1] = bits.y, b[n][4 * v + 2] = bits.z, b[n][4 * v + 3] = bits.w;
        }
      }
    };
    load_b(0);
    const uint8_t* chunk = ring.wait();
    uint4 codes[2][2];
    uint32_t scales[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[tile][half] =
            *reinterpret_cast<const uint4*>(chunk + tile * kTileCodeBytes + half * 512 + lane * 16);
      }
      const uint8_t* at =
          chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(kBlock) + lane * 2 * kScales;
      if constexpr (kBlock == 16) {
        scales[tile] = *reinterpret_cast<const uint32_t*>(at);
      } else {
        scales[tile] = *reinterpret_cast<const uint16_t*>(at);
      }
    }
    __syncwarp();  // all lanes hold their part of the chunk: its stage is free
    ++ring.tail;
    if (lane == 0) feed();
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 16 columns of each lane
      if (part == 1) load_b(1);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        uint32_t weights[2][8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& word = codes[tile][half];
          uint32_t pairs[2][4];
          decode(part == 0 ? word.x : word.z, pairs[0]);
          decode(part == 0 ? word.y : word.w, pairs[1]);
          const uint32_t scale = scale_pair<kBlock>(scales[tile], half * kScales + (kScales == 2 ? part : 0));
#pragma unroll
          for (int p = 0; p < 8; ++p) weights[half][p] = mul_bf16x2(pairs[p / 4][p % 4], scale);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            mma_bf16(sums[tile][n], weights[0][2 * m], weights[1][2 * m], weights[0][2 * m + 1],
                     weights[1][2 * m + 1], b[n][2 * m], b[n][2 * m + 1]);
          }
        }
      }
    }
  }
}

// Dynamic shared memory: the stages of all warps, their barriers, then what joins the halves of each pair.
template <int kBlock, int kWarps>
struct SharedLayout {
  static constexpr int kSumBytes = 2 * kMaxTiles * 4 * 32 * 4;  // of one task; a pair has two in turn
  static constexpr int kBarriers = kWarps * kStages * chunk_bytes(kBlock);
  static constexpr int kSums = kBarriers + (kWarps * kStages * 8 + 127) / 128 * 128;
  static constexpr int kBytes = kSums + kWarps / 2 * 2 * kSumBytes;
};

// What a pair of warps does with one task once the weights are on their way.
template <int kBlock, int kTiles, class Feed>
__device__ inline void run_task(const MoeDecodeArgs& a, const Workspace& w, const Tasks& tasks, int j, int pair,
                                int half, Ring<kBlock>& ring, Feed feed, float* sums_shared) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int d = (s.model + 127) / 128 * 128, i = (s.width + 127) / 128 * 128;
  const bool down = j >= tasks.gate_up;
  const int at = down ? j - tasks.gate_up : j, tiles = down ? tasks.down_tiles : tasks.gate_up_tiles;
  const int index = at / tiles, tile = at % tiles;
  const RowBlock block = w.block[index];
  if (down) {
    if (lane == 0) {
      while (load_acquire(w.ready + index) < static_cast<uint32_t>(tasks.gate_up_tiles)) __nanosleep(64);
    }
    __syncwarp();
  }
  const __nv_bfloat16* rows[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = n * kTokensOfTile + g / 2;
    rows[n] = nullptr;
    if (row < block.count) {
      rows[n] = down ? w.h + (static_cast<int64_t>(block.first + row) * 2 + g % 2) * i
                     : w.x + (static_cast<int64_t>(w.row_token[block.first + row]) * 2 + g % 2) * d;
    }
  }
  float sums[2][kTiles][4] = {};
  const int chunks = ((down ? s.width : s.model) + 127) / 128, middle = (chunks + 1) / 2;
  multiply<kBlock, kTiles>(ring, feed, half == 0 ? 0 : middle, half == 0 ? middle : chunks - middle, rows, sums);

  // The second half's sums join the first's.
  if (half == 1) {
#pragma unroll
    for (int v = 0; v < 2 * kTiles * 4; ++v)
      sums_shared[v * 32 + lane] = sums[v / (kTiles * 4)][v / 4 % kTiles][v % 4];
  }
  pair_barrier(1 + pair);
  if (half == 1) return;
#pragma unroll
  for (int v = 0; v < 2 * kTiles * 4; ++v)
    sums[v / (kTiles * 4)][v / 4 % kTiles][v % 4] += sums_shared[v * 32 + lane];

  const PackedExpert expert = a.experts[block.expert];
  if (!down) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = n * kTokensOfTile + q;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = tile * 16 + r * 8 + g;
        float gate = (sums[0][n][2 * r] + sums[0][n][2 * r + 1]) * (expert.gate_scale * kUnscale);
        float up = (sums[1][n][2 * r] + sums[1][n][2 * r + 1]) * (expert.up_scale * kUnscale);
        if (column < s.width) {
          if (expert.gate_bias != nullptr) gate += expert.gate_bias[column];
          if (expert.up_bias != nullptr) up += expert.up_bias[column];
        }
        if (row < block.count) {
          __nv_bfloat16* to = w.h + static_cast<int64_t>(block.first + row) * 2 * i + column;
          split(column < s.width ? activated(a.activation, gate, up) : 0.0f, to[0], to[i]);
        }
      }
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(w.ready + index, 1u);
    return;
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = n * kTokensOfTile + q;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = tile * 32 + t * 16 + r * 8 + g;
        float value = (sums[t][n][2 * r] + sums[t][n][2 * r + 1]) * (expert.down_scale * kUnscale);
        if (expert.down_bias != nullptr && column < s.model) value += expert.down_bias[column];
        if (row < block.count) w.partial[static_cast<int64_t>(block.first + row) * d + column] = value;
      }
    }
  }
  // Who brings the last part of a token's 32 columns adds them up, in the order of a.
  __threadfence();
  __syncwarp();
  bool last = false;
  int token = 0;
  if (lane < block.count) {
    token = w.row_token[block.first + lane];
    last = atomicAdd(w.arrived + static_cast<int64_t>(token) * tiles + tile, 1u) + 1 ==
           static_cast<uint32_t>(s.chosen);
  }
  __threadfence();
  for (uint32_t mask = __ballot_sync(~0u, last); mask != 0; mask &= mask - 1) {
    const int64_t t = __shfl_sync(~0u, token, __ffs(static_cast<int>(mask)) - 1);
    const int column = tile * 32 + lane;
    float sum = 0;
    for (int c = 0; c < s.chosen; ++c) {
      const int64_t row = w.grouped_row[t * s.chosen + c];
      sum += a.weights[t * a.weights_stride + c] * __ldcg(w.partial + row * d + column);
    }
    if (column < s.model) a.out[t * a.out_stride + column] = sum;
  }
}

template <int kBlock, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) moe_layer(MoeDecodeArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = SharedLayout<kBlock, kWarps>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int half = warp % 2, pair = warp / 2;
  Ring<kBlock> ring;
  ring.stages = shared + warp * kStages * chunk_bytes(kBlock);
  ring.barriers = reinterpret_cast<uint64_t*>(shared + Layout::kBarriers) + warp * kStages;
  ring.policy = evict_first_policy();
  float* const sums_of_pair = reinterpret_cast<float*>(shared + Layout::kSums + pair * 2 * Layout::kSumBytes);
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(ring.barriers + i);
    barrier_init_fence();
  }
  __syncwarp();
  dependency_wait();
  dependency_launch();

  const Workspace w = workspace_at(static_cast<char*>(a.workspace), a.shape, a.tokens);
  Tasks tasks;
  tasks.gate_up_tiles = (a.shape.width + 127) / 128 * 8;
  tasks.down_tiles = (a.shape.model + 127) / 128 * 4;
  const int blocks = *w.blocks;
  tasks.gate_up = blocks * tasks.gate_up_tiles;
  tasks.total = tasks.gate_up + blocks * tasks.down_tiles;
  // Neighbouring pairs are on different multiprocessors: each gets its share of a small step.
  const int pairs = static_cast<int>(gridDim.x) * (kWarps / 2);
  const int first = pair * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  Feeder<kBlock> feeder;
  feeder.j = first;
  auto feed = [&] { feeder.feed(ring, tasks, w, a, half, pairs); };
  if (lane == 0) feed();
  int buffer = 0;
  for (int j = first; j < tasks.total; j += pairs) {
    const int at = j >= tasks.gate_up ? (j - tasks.gate_up) / tasks.down_tiles : j / tasks.gate_up_tiles;
    const int count = w.block[at].count;
    float* sums = sums_of_pair + buffer * (Layout::kSumBytes / 4);
    buffer ^= 1;
    if (count <= kTokensOfTile) {
      run_task<kBlock, 1>(a, w, tasks, j, pair, half, ring, feed, sums);
    } else if (count <= 2 * kTokensOfTile) {
      run_task<kBlock, 2>(a, w, tasks, j, pair, half, ring, feed, sums);
    } else {
      run_task<kBlock, 4>(a, w, tasks, j, pair, half, ring, feed, sums);
    }
  }
}

struct Device {
  int multiprocessors = 0, shared_bytes = 0;
};

cudaError_t current_device(Device& device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  return error;
}

template <class Kernel>
cudaError_t launch(Kernel kernel, int grid, int threads, int shared_bytes, const MoeDecodeArgs& args,
                   cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <int kBlock, int kWarps>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kBytes = SharedLayout<kBlock, kWarps>::kBytes;
  cudaError_t error = cudaFuncSetAttribute(moe_layer<kBlock, kWarps>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  return launch(moe_layer<kBlock, kWarps>, device.multiprocessors, kWarps * 32, kBytes, args, stream);
}

template <int kBlock>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  if (device.shared_bytes >= SharedLayout<kBlock, 16>::kBytes) return launch_layer<kBlock, 16>(args, device, stream);
  return launch_layer<kBlock, 8>(args, device, stream);
}

}  // namespace

int64_t MoeShape::gate_up_bytes() const {
  return static_cast<int64_t>(width_chunks()) * 8 * model_chunks() * chunk_bytes(block);
}
int64_t MoeShape::down_bytes() const {
  return static_cast<int64_t>(model_chunks()) * 4 * width_chunks() * chunk_bytes(block);
}

int64_t moe_decode_workspace_bytes(const MoeShape& shape, int tokens) {
  return workspace_at(nullptr, shape, tokens).bytes;
}

cudaError_t repack_gate_up(const MoeShape& shape, DiskMatrix gate, DiskMatrix up, uint8_t* to,
                           cudaStream_t stream) {
  return repack(gate, up, false, shape.width, shape.model, shape.block, to, stream);
}

cudaError_t repack_down(const MoeShape& shape, DiskMatrix down, uint8_t* to, cudaStream_t stream) {
  return repack(down, down, true, shape.model, shape.width, shape.block, to, stream);
}

cudaError_t moe_decode(const MoeDecodeArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const int64_t elements = static_cast<int64_t>(args.tokens) * args.shape.model_chunks() * 128;
  const int grid = 1 + static_cast<int>(std::min<int64_t>((elements + 1023) / 1024, device.multiprocessors));
  error = launch(group_rows, grid, 1024, 0, args, stream);
  if (error != cudaSuccess) return error;
  return args.shape.block == 16 ? launch_layer<16>(args, device, stream)
                                : launch_layer<32>(args, device, stream);
}

}  // namespace nibble::cuda
