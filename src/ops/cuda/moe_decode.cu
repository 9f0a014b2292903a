#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/moe_decode.h"
#include "ops/cuda/moe_tiles.h"
#include "ops/cuda/primitives.cuh"
#include "ops/cuda/tile_decode.cuh"

namespace nibble::cuda {
namespace {

constexpr int kTokensOfTile = 4;                     // an MMA's 8 columns: both parts of four tokens
constexpr int kMaxTiles = 2;                         // column tiles of one pass over the weights
constexpr int kMaxRows = kTokensOfTile * kMaxTiles;  // rows of an expert in one pass
constexpr int kStages = 2;                           // of a warp

// Some rows of one expert: what one pass over its weights serves.
struct RowBlock {
  const uint8_t *gate_up, *down;  // the expert's weights
  int expert, first, count;       // rows of the grouped order
};

// Where the workspace holds what. The first part is zeroed or written by the grouping kernel.
struct Workspace {
  int* blocks;        // [1] how many row blocks there are
  RowBlock* block;    // [max blocks]
  int* row_token;     // [R] token of a grouped row
  int* row_pair;      // [R] t * A + a of a grouped row
  int* grouped_row;   // [R] the inverse
  uint32_t* ready;    // [max blocks] finished gate_up tasks of a block
  uint32_t* arrived;  // [T, D/32] experts that have written their part of an output
  __nv_bfloat16* x;   // [T, 2, D'] the input's two parts, in operand_place; D', I': rounded up to 128
  __nv_bfloat16* h;   // [R, 2, I'] the activation's two parts, likewise
  float* partial;     // [R, D'] products of down
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
      if (block == 16) {
        const uint8_t scale = m.scales[row * (k / 16) + column / 16];
        if ((scale & 0x80) != 0) codes ^= 0x88888888u;
        if ((scale & 0x7F) == 0) codes = 0;
      }
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
        at[half * each + b] = block == 16 ? place_scale(scale) : scale;
      }
    }
  }
}

cudaError_t repack(DiskMatrix first, DiskMatrix second, bool down, int n, int k, int block, uint8_t* to,
                   cudaStream_t stream) {
  const int rows = down ? 32 : 16;
  const int64_t chunks = static_cast<int64_t>((n + rows - 1) / rows) * ((k + 127) / 128);
  auto grid = [](int64_t work) {
    return static_cast<unsigned>(std::min<int64_t>((work + 255) / 256, 65535));
  };
  repack_codes<<<grid(chunks * 512), 256, 0, stream>>>(first, second, down, n, k, block, to, chunks * 512);
  repack_scales<<<grid(chunks * 64), 256, 0, stream>>>(first, second, down, n, k, block, to, chunks * 64);
  return cudaGetLastError();
}

// ---- grouping

// Block 0: rows in the stable order of (expert, token), cut into row blocks; counters to zero. The others:
// the two parts of x.
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
      __nv_bfloat16* to = w.x + t * 2 * d + operand_place<32>(c);
      split(c < s.model ? a.x[t * a.x_stride + c] : 0.0f, to[0], to[d]);
    }
    return;
  }
  const int rows = a.tokens * s.chosen, me = static_cast<int>(threadIdx.x), warp = me / 32, lane = me % 32;
  for (int i = me; i < a.tokens * (d / 32); i += 1024) w.arrived[i] = 0;
  for (int i = me; i < max_blocks(s.experts, rows); i += 1024) w.ready[i] = 0;
  auto id = [&](int row) { return a.ids[row / s.chosen * a.ids_stride + row % s.chosen]; };

  // How many rows each expert has (thread by expert), and where its rows and its blocks begin.
  __shared__ int next_row[kMaxExperts];  // first the count, then the place of the expert's next row
  __shared__ int2 warp_sum[32];
  next_row[me] = 0;
  __syncthreads();
  for (int row = me; row < rows; row += 1024) atomicAdd(&next_row[id(row)], 1);
  __syncthreads();
  const int count = next_row[me], blocks = (count + kMaxRows - 1) / kMaxRows;
  int2 sum = {count, blocks};
  auto add_below = [&] {  // inclusive sums over the lanes
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
      if (lane >= step) sum.x += x, sum.y += y;
    }
  };
  add_below();
  if (lane == 31) warp_sum[warp] = sum;
  __syncthreads();
  const int2 own = sum;
  sum = warp_sum[lane];
  add_below();
  const int2 before = {__shfl_sync(~0u, sum.x, (warp + 31) % 32), __shfl_sync(~0u, sum.y, (warp + 31) % 32)};
  const int first_row = own.x - count + (warp > 0 ? before.x : 0);
  const int first_block = own.y - blocks + (warp > 0 ? before.y : 0);
  for (int b = 0; b < blocks; ++b) {
    w.block[first_block + b] = {a.experts[me].gate_up, a.experts[me].down, me, first_row + b * kMaxRows,
                                min(kMaxRows, count - b * kMaxRows)};
  }
  if (me == 1023) *w.blocks = first_block + blocks;
  next_row[me] = first_row;

  // Rows of an expert in their order: 1024 at a time, a row's place by how many before it chose the same.
  __shared__ __align__(16) uint8_t seen[32][kMaxExperts];  // rows of a warp that chose the expert
  for (int begin = 0; begin < rows; begin += 1024) {
    for (int i = me; i < 32 * kMaxExperts / 16; i += 1024) reinterpret_cast<uint4*>(seen)[i] = {0, 0, 0, 0};
    const int row = begin + me, expert = row < rows ? id(row) : -1;
    const uint32_t same = __match_any_sync(~0u, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    __syncthreads();
    if (expert >= 0 && rank == 0) seen[warp][expert] = static_cast<uint8_t>(__popc(same));
    __syncthreads();
    if (expert >= 0) {
      int place = next_row[expert] + rank;
      for (int other = 0; other < warp; ++other) place += seen[other][expert];
      w.row_token[place] = row / s.chosen;
      w.row_pair[place] = row;
      w.grouped_row[row] = place;
    }
    __syncthreads();
    int total = 0;
    for (int other = 0; other < 32; ++other) total += seen[other][me];
    next_row[me] += total;
    __syncthreads();
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

// A warp's ring of chunks, which runs on from task to task without a gap.
template <int kBlock>
struct Ring {
  static constexpr int kBytes = chunk_bytes(kBlock);
  uint8_t* stages;     // [kStages][kBytes] in shared memory
  uint64_t* barriers;  // [kStages]
  uint64_t policy;
  int stage = 0;  // of the next chunk to use, which is the stage that was asked for longest ago
  uint32_t parity = 0;

  __device__ void ask(int at, const uint8_t* from) const {  // by one lane
    barrier_expect(barriers + at, kBytes);
    bulk_copy(stages + at * kBytes, from, kBytes, barriers + at, policy);
  }
  __device__ const uint8_t* wait() const {
    barrier_wait(barriers + stage, parity);
    return stages + stage * kBytes;
  }
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// A task of a pair of warps: two tiles of weight rows times the rows of a block.
struct Task {
  bool down;
  int block, tile;
};

// The tasks of a pair of warps in their order: all of gate_up's (tile after tile, block after block), then
// all of down's. The pairs of a multiprocessor take neighbours, and of a large step several lots in a row:
// they mostly read the same rows, through one cache.
struct Tasks {
  int gate_up_tiles, down_tiles;  // of a block
  int gate_up, all;               // how many
  int at, step, lots, lot = 0, skip;

  __device__ Tasks(const MoeShape& s, int blocks, int pair, int pairs)
      : gate_up_tiles(s.width_chunks() * 8),
        down_tiles(s.model_chunks() * 4),
        gate_up(blocks * gate_up_tiles),
        all(gate_up + blocks * down_tiles),
        step(pairs) {
    const int multiprocessors = static_cast<int>(gridDim.x);
    // At least eight turns of each, so that all end at about the same time.
    lots = max(1, min(4, all / (pairs * multiprocessors * 16)));
    at = static_cast<int>(blockIdx.x) * lots * pairs + pair;
    skip = (multiprocessors - 1) * lots * pairs;
  }
  __device__ bool done() const { return at >= all; }
  __device__ Task task() const {
    const bool down = at >= gate_up;
    const int i = down ? at - gate_up : at, tiles = down ? down_tiles : gate_up_tiles;
    return {down, i / tiles, i % tiles};
  }
  __device__ void next() {
    at += step;
    if (++lot == lots) lot = 0, at += skip;
  }
};

__device__ inline int chunks_of(const MoeShape& s, bool down) {
  return down ? s.width_chunks() : s.model_chunks();
}
// The two halves of K: of the warps of a pair, one takes the chunks below this, one the others.
__device__ inline int middle_of(int chunks) { return (chunks + 1) / 2; }

// The chunks that a warp will need, task after task.
template <int kBlock>
struct Feeder {
  Tasks tasks;  // after the one that is being fed
  const uint8_t* from = nullptr;
  int chunks = 0;  // left in the task

  // Asks for the next chunk, if there is one, into a free stage.
  __device__ void feed(const Ring<kBlock>& ring, int stage, const MoeShape& s, const RowBlock* blocks,
                       int half) {
    while (chunks == 0) {
      if (tasks.done()) return;
      const Task task = tasks.task();
      const RowBlock& block = blocks[task.block];
      const int all = chunks_of(s, task.down), middle = middle_of(all), first = half == 0 ? 0 : middle;
      from = (task.down ? block.down : block.gate_up) +
             (static_cast<int64_t>(task.tile) * all + first) * chunk_bytes(kBlock);
      chunks = half == 0 ? middle : all - middle;
      tasks.next();
    }
    ring.ask(stage, from);
    from += chunk_bytes(kBlock);
    --chunks;
  }
};

// One task: sums[tile][n][4] of this warp's half of K. `rows`: elements of lane's column (its token and part)
// of each tile n, at column 0 of K; null: no such row.
template <int kBlock, int kTiles, class Feed>
__device__ inline void multiply(Ring<kBlock>& ring, Feed feed, int first_chunk, int chunks,
                                const __nv_bfloat16* const (&rows)[kTiles], float (&sums)[2][kTiles][4]) {
  const int lane = threadIdx.x % 32;
  constexpr int kScales = 32 / kBlock;  // of a row
  // The operands of the tokens: of a lane's 32 columns of a chunk, the first 16 and the last 16. Either half
  // is under way while the products of the other run. A column without a row stays zero.
  uint32_t b[2][kTiles][8] = {};
  auto load_b = [&](int chunk, int part) {
    const int place = chunk * kChunkColumns + part * 64 + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (rows[n] == nullptr) continue;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const uint4 bits = *reinterpret_cast<const uint4*>(rows[n] + place + v * 32);
        b[part][n][4 * v] = bits.x, b[part][n][4 * v + 1] = bits.y;
        b[part][n][4 * v + 2] = bits.z, b[part][n][4 * v + 3] = bits.w;
      }
    }
  };
  if (chunks > 0) load_b(first_chunk, 0);
#pragma unroll 2
  for (int c = 0; c < chunks; ++c) {
    load_b(first_chunk + c, 1);
    const uint8_t* const chunk = ring.wait();
    uint4 codes[2][2];
    uint32_t scales[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[tile][half] =
            *reinterpret_cast<const uint4*>(chunk + tile * kTileCodeBytes + half * 512 + lane * 16);
      }
      const uint8_t* at = chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(kBlock) + lane * 2 * kScales;
      if constexpr (kBlock == 16) {
        scales[tile] = *reinterpret_cast<const uint32_t*>(at);
      } else {
        scales[tile] = *reinterpret_cast<const uint16_t*>(at);
      }
    }
    __syncwarp();  // all lanes hold their part of the chunk: its stage is free
    if (lane == 0) feed(ring.stage);
    ring.advance();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 1 && c + 1 < chunks) load_b(first_chunk + c + 1, 0);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        uint32_t weights[2][8], scale[2];
        scale[0] = scale_pair<kBlock>(scales[tile], part);
        scale[1] = high_twice(scale[0]);
        scale[0] = low_twice(scale[0]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& word = codes[tile][half];
          uint32_t pairs[2][4];
          decode(part == 0 ? word.x : word.z, pairs[0]);
          decode(part == 0 ? word.y : word.w, pairs[1]);
#pragma unroll
          for (int p = 0; p < 8; ++p) weights[half][p] = mul_bf16x2(pairs[p / 4][p % 4], scale[half]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            mma_bf16(sums[tile][n], weights[0][2 * m], weights[1][2 * m], weights[0][2 * m + 1],
                     weights[1][2 * m + 1], b[part][n][2 * m], b[part][n][2 * m + 1]);
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
__device__ inline void run_task(const MoeDecodeArgs& a, const Workspace& w, const Task& task,
                                const RowBlock& block, int pair, int half, bool finishes, Ring<kBlock>& ring,
                                Feed feed, float* sums_shared) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int d = (s.model + 127) / 128 * 128, i = (s.width + 127) / 128 * 128;
  const bool down = task.down;
  const int tile = task.tile;
  if (down) {
    if (lane == 0) {
      while (load_relaxed(w.ready + task.block) < static_cast<uint32_t>(s.width_chunks() * 8))
        __nanosleep(20);
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
  const int chunks = chunks_of(s, down), middle = middle_of(chunks);
  multiply<kBlock, kTiles>(ring, feed, half == 0 ? 0 : middle, half == 0 ? middle : chunks - middle, rows,
                           sums);

  // The sums of both halves of K; a + b and b + a are the same bits.
  if (!finishes) {
#pragma unroll
    for (int v = 0; v < 2 * kTiles * 4; ++v)
      sums_shared[v * 32 + lane] = sums[v / (kTiles * 4)][v / 4 % kTiles][v % 4];
  }
  pair_barrier(1 + pair);
  if (!finishes) return;
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
          __nv_bfloat16* to =
              w.h + static_cast<int64_t>(block.first + row) * 2 * i + operand_place<32>(column);
          split(column < s.width ? activated(a.activation, gate, up) : 0.0f, to[0], to[i]);
        }
      }
    }
    __syncwarp();
    if (lane == 0) add_release(w.ready + task.block, 1);
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
  __syncwarp();
  bool last = false;
  int token = 0;
  if (lane < block.count) {
    token = w.row_token[block.first + lane];
    last = add_release(w.arrived + static_cast<int64_t>(token) * (d / 32) + tile, 1) + 1 ==
           static_cast<uint32_t>(s.chosen);
  }
  for (uint32_t mask = __ballot_sync(~0u, last); mask != 0; mask &= mask - 1) {
    const int64_t t = __shfl_sync(~0u, token, __ffs(static_cast<int>(mask)) - 1);
    const int column = tile * 32 + lane;
    float sum = 0;
    for (int first = 0; first < s.chosen; first += 8) {  // eight loads under way, added in order
      float part[8], weight[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        part[c] = weight[c] = 0;
        if (first + c >= s.chosen) continue;
        const int64_t row = w.grouped_row[t * s.chosen + first + c];
        weight[c] = a.weights[t * a.weights_stride + first + c];
        part[c] = __ldcg(w.partial + row * d + column);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) sum = first + c < s.chosen ? sum + weight[c] * part[c] : sum;
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
  ring.stages = shared + warp * kStages * Ring<kBlock>::kBytes;
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
  Tasks tasks(a.shape, *w.blocks, pair, kWarps / 2);
  Feeder<kBlock> feeder{tasks};
  auto feed = [&](int stage) { feeder.feed(ring, stage, a.shape, w.block, half); };
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) feed(i);
  }
  // Which of the two buffers of sums a task uses; also which half finishes it, so that both have the same
  // work.
  int buffer = 0;
  for (; !tasks.done(); tasks.next(), buffer ^= 1) {
    const Task task = tasks.task();
    const RowBlock block = w.block[task.block];
    float* sums = sums_of_pair + buffer * (Layout::kSumBytes / 4);
    if (block.count <= kTokensOfTile) {
      run_task<kBlock, 1>(a, w, task, block, pair, half, half == buffer, ring, feed, sums);
    } else {
      run_task<kBlock, 2>(a, w, task, block, pair, half, half == buffer, ring, feed, sums);
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

template <int kBlock, int kWarps>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kBytes = SharedLayout<kBlock, kWarps>::kBytes;
  cudaError_t error =
      cudaFuncSetAttribute(moe_layer<kBlock, kWarps>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  launch_early(moe_layer<kBlock, kWarps>, device.multiprocessors, kWarps * 32, kBytes, stream, args);
  return cudaGetLastError();
}

template <int kBlock>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  if (device.shared_bytes >= SharedLayout<kBlock, 16>::kBytes)
    return launch_layer<kBlock, 16>(args, device, stream);
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

cudaError_t make_4bit_tiles(const uint8_t* codes, const uint8_t* scales, int n, int k, int block, uint8_t* to,
                            cudaStream_t stream) {
  return repack({codes, scales}, {codes, scales}, true, n, k, block, to, stream);
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
  launch_early(group_rows, grid, 1024, 0, stream, args);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return args.shape.block == 16 ? launch_layer<16>(args, device, stream)
                                : launch_layer<32>(args, device, stream);
}

}  // namespace nibble::cuda
