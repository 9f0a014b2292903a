#include <algorithm>

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/moe_workspace.h"
#include "ops/cuda/primitives.cuh"
#include "ops/cuda/tile_decode.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 8;  // that multiply: three warp groups
constexpr int kHeld =
    4;  // chunks of such a warp whose operands stay in registers; also how many stages there are
constexpr int kStages = kHeld;
constexpr int kFinishers = 3;  // with the loader a third warp group
constexpr int kLoader = kWarps;
constexpr int kThreads = (kWarps + 1 + kFinishers) * 32;
// Registers of a thread: 384 threads start with 168 each.
constexpr int kMultiplyRegisters = 216, kOtherRegisters = 72;

// Neighbouring tasks of one row block: `count` pairs of weight tiles, from `tile` on.
struct Run {
  bool down;
  int block, tile, count;
};

// The runs of this multiprocessor: its share of gate and up, then of down. Of down, those
// of its first block come last: that block is shared with the multiprocessor before, which was at its part of
// it only now.
struct Runs {
  const Workspace& w;
  int segment = -1, at = 0, end = 0;

  __device__ bool next(const MoeShape& s, Run& run) {
    while (at == end) {
      if (++segment == 3) return false;
      const int* share = segment > 0 ? w.down_share : w.gate_up_share;
      at = share[blockIdx.x], end = share[blockIdx.x + 1];
      const int tiles = tiles_of(s, segment > 0), middle = min(end, (at + tiles - 1) / tiles * tiles);
      if (segment == 1) at = middle;
      if (segment == 2) end = middle;
    }
    const int tiles = tiles_of(s, segment > 0);
    run = {segment > 0, at / tiles, at % tiles, 0};
    run.count = min(end - at, tiles - run.tile);
    at += run.count;
    return true;
  }
};

// How K is cut over the warps: warp p of a group takes chunks p, p + parts, ... It depends on K alone.
struct Split {
  int chunks, parts = 1, groups, rows;  // rows: chunks of a warp, a multiple of kHeld
  __device__ Split(const MoeShape& s, bool down) : chunks(down ? s.width_chunks() : s.model_chunks()) {
    while (parts < kWarps && (chunks > parts * kHeld || kWarps % parts != 0)) ++parts;
    groups = kWarps / parts;
    rows = (chunks + parts * kHeld - 1) / (parts * kHeld) * kHeld;
  }
};

// A ring of kCount places in shared memory between producers and consumers.
template <int kCount>
struct Ring {
  uint64_t *full, *empty;  // [kCount]
  int place = 0;
  uint32_t parity = 0;
  __device__ void wait_full() const { barrier_wait(full + place, parity); }
  __device__ void wait_empty() const { barrier_wait(empty + place, parity ^ 1); }
  __device__ void advance() {
    if (++place == kCount) place = 0, parity ^= 1;
  }
};

// Dynamic shared memory. A stage: a chunk of each warp. A buffer: the sums of a round of tasks.
template <int kBlock, int kBuffers>
struct SharedLayout {
  static constexpr int kStageBytes = kWarps * chunk_bytes(kBlock);
  static constexpr int kBufferBytes = kWarps * kMaxTiles * 32 * 16;
  static constexpr int kSums = kStages * kStageBytes;
  static constexpr int kBarriers = kSums + kBuffers * kBufferBytes;
  static constexpr int kBytes = kBarriers + 2 * (kStages + kBuffers) * 8;
};

// The operands of a chunk: its 128 columns of this lane's token and part, of each tile of tokens.
template <int kTiles>
__device__ inline void load_operands(const __nv_bfloat16* const (&rows)[kTiles], int chunk,
                                     uint32_t (&b)[kTiles][16]) {
  const int place = chunk * kChunkColumns + static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (rows[n] == nullptr) continue;  // a column without a row stays zero
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const uint4 bits = *reinterpret_cast<const uint4*>(rows[n] + place + v * 32);
      b[n][4 * v] = bits.x, b[n][4 * v + 1] = bits.y, b[n][4 * v + 2] = bits.z, b[n][4 * v + 3] = bits.w;
    }
  }
}

// What a lane needs of a chunk.
struct Codes {
  uint4 codes[2][2];  // [tile][half]
  uint32_t scales[2];
};
template <int kBlock>
__device__ inline Codes load_codes(const uint8_t* chunk) {
  const int lane = threadIdx.x % 32;
  constexpr int kScales = 32 / kBlock;  // of a row
  Codes c;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const uint8_t* at = chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(kBlock) + lane * 2 * kScales;
    if constexpr (kBlock == 16) {
      c.scales[tile] = *reinterpret_cast<const uint32_t*>(at);
    } else {
      c.scales[tile] = *reinterpret_cast<const uint16_t*>(at);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      c.codes[tile][half] =
          *reinterpret_cast<const uint4*>(chunk + tile * kTileCodeBytes + half * 512 + lane * 16);
    }
  }
  return c;
}

// sums[tile][n] += the products of a chunk.
template <int kBlock, int kTiles>
__device__ inline void multiply(const Codes& c, const uint32_t (&b)[kTiles][16],
                                float (&sums)[2][kTiles][4]) {
  uint32_t scale[2][2][2];  // [part][tile][half]
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint32_t both = scale_pair<kBlock>(c.scales[tile], part);
      scale[part][tile][0] = low_twice(both), scale[part][tile][1] = high_twice(both);
    }
  }
  // A word of both halves is two products deep. Both tiles' are decoded before their products, so that the
  // registers of a product are not written to again right behind it.
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    uint32_t weights[2][2][4];  // [tile][half]
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& words = c.codes[tile][half];
        uint32_t pairs[4];
        decode(v == 0 ? words.x : v == 1 ? words.y : v == 2 ? words.z : words.w, pairs);
#pragma unroll
        for (int p = 0; p < 4; ++p) weights[tile][half][p] = mul_bf16x2(pairs[p], scale[v / 2][tile][half]);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const auto& w = weights[tile];
          mma_bf16(sums[tile][n], w[0][2 * m], w[1][2 * m], w[0][2 * m + 1], w[1][2 * m + 1],
                   b[n][v * 4 + 2 * m], b[n][v * 4 + 2 * m + 1]);
        }
      }
    }
  }
}

// The tasks of a run go in rounds, one to each group of warps. The chunks of a row of K, and of all groups,
// are a stage.
template <int kBlock>
__device__ inline void load_run(const Run& run, const RowBlock& block, const Split& k, uint8_t* stages,
                                Ring<kStages>& ring) {
  constexpr int kChunk = chunk_bytes(kBlock);
  const uint64_t policy = evict_first_policy();
  const uint8_t* from = (run.down ? block.down : block.gate_up) + int64_t{run.tile} * k.chunks * kChunk;
  for (int task = 0; task < run.count; task += k.groups) {
    const int tasks = min(k.groups, run.count - task);
    for (int row = 0; row < k.rows; ++row) {
      const int first = row * k.parts, bytes = max(min(k.parts, k.chunks - first), 0) * kChunk;
      ring.wait_empty();
      barrier_expect(ring.full + ring.place, bytes * tasks);
      for (int group = 0; group < tasks && bytes > 0; ++group) {
        bulk_copy(stages + (ring.place * kWarps + group * k.parts) * kChunk,
                  from + (int64_t{task + group} * k.chunks + first) * kChunk, bytes, ring.full + ring.place,
                  policy);
      }
      ring.advance();
    }
  }
}

template <int kBlock, int kTiles, int kBuffers>
__device__ inline void multiply_run(const MoeDecodeArgs& a, const Workspace& w, const Run& run,
                                    const RowBlock& block, const Split& k, const uint8_t* stages,
                                    Ring<kStages>& ring, float4* buffers, Ring<kBuffers>& out) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4;
  const int group = warp / k.parts, part = warp % k.parts;
  const int own_rows = (k.chunks - part + k.parts - 1) / k.parts;
  const int d = a.shape.model_chunks() * 128, i = a.shape.width_chunks() * 128;
  if (run.down) {
    if (lane == 0) {
      while (load_relaxed(w.ready + run.block) < static_cast<uint32_t>(tiles_of(a.shape, false)))
        __nanosleep(20);
    }
    __syncwarp();
  }
  const __nv_bfloat16* rows[kTiles];  // of this lane's token and part; null: no such row
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = n * kTokensOfTile + g / 2;
    rows[n] = nullptr;
    if (row < block.count) {
      rows[n] = run.down ? w.h + (static_cast<int64_t>(block.first + row) * 2 + g % 2) * i
                         : w.x + (static_cast<int64_t>(w.row_token[block.first + row]) * 2 + g % 2) * d;
    }
  }
  uint32_t b[kHeld][kTiles][16] = {};
  auto load = [&](int row) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      const int chunk = (row + c) * k.parts + part;
      if (chunk < k.chunks) load_operands<kTiles>(rows, chunk, b[c]);
    }
  };
  if (k.rows <= kHeld) load(0);
  for (int task = group; task < run.count + group; task += k.groups) {
    const int mine = task < run.count ? own_rows : 0;
    float sums[2][kTiles][4] = {};
    for (int row = 0; row < k.rows; row += kHeld) {
      if (k.rows > kHeld) load(row);
      // Stage c holds chunk c of these; what a lane needs of the next is loaded before the products of one.
      const uint8_t* const own = stages + warp * chunk_bytes(kBlock);
      Codes codes;
      auto take = [&](int c) {
        barrier_wait(ring.full + c, ring.parity);
        codes = load_codes<kBlock>(own + c * kWarps * chunk_bytes(kBlock));
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty + c);
      };
      constexpr bool kAhead = kTiles == 1;  // with two tiles the registers are taken
      if (kAhead) take(0);
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        if (!kAhead) take(c);
        const Codes now = codes;
        if (kAhead && c + 1 < kHeld) take(c + 1);
        if (row + c < mine) multiply<kBlock, kTiles>(now, b[c], sums);
      }
      ring.parity ^= 1;
    }
    out.wait_empty();
    float4* const to = buffers + (out.place * kWarps + warp) * kMaxTiles * 32 + lane;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {  // both parts of a token are neighbours
      const float *first = sums[0][n], *second = sums[1][n];
      to[n * 32] = {first[0] + first[1], first[2] + first[3], second[0] + second[1], second[2] + second[3]};
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(out.full + out.place);
    out.advance();
  }
}

// What becomes of the sums of a task. Of token 4 n + q, weight rows g and g + 8 of both tiles.
__device__ inline void finish_gate_up(const MoeDecodeArgs& a, const Workspace& w, const RowBlock& block,
                                      int tile, int n, const float4& sums) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, g = lane / 4, row = n * kTokensOfTile + lane % 4;
  const int i = s.width_chunks() * 128;
  const PackedExpert& expert = a.experts[block.expert];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int column = tile * 16 + r * 8 + g;
    float gate = (r == 0 ? sums.x : sums.y) * (expert.gate_scale * kUnscale);
    float up = (r == 0 ? sums.z : sums.w) * (expert.up_scale * kUnscale);
    if (column < s.width) {
      if (expert.gate_bias != nullptr) gate += expert.gate_bias[column];
      if (expert.up_bias != nullptr) up += expert.up_bias[column];
    }
    if (row < block.count) {
      __nv_bfloat16* to = w.h + static_cast<int64_t>(block.first + row) * 2 * i + operand_place<32>(column);
      split(column < s.width ? activated(a.activation, gate, up) : 0.0f, to[0], to[i]);
    }
  }
}

__device__ inline void finish_down(const MoeDecodeArgs& a, const Workspace& w, const RowBlock& block,
                                   int tile, int n, const float4& sums) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, g = lane / 4, row = n * kTokensOfTile + lane % 4;
  const int d = s.model_chunks() * 128;
  const PackedExpert& expert = a.experts[block.expert];
  const float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int column = tile * 32 + v * 8 + g;
    float value = values[v] * (expert.down_scale * kUnscale);
    if (expert.down_bias != nullptr && column < s.model) value += expert.down_bias[column];
    if (row < block.count) w.partial[static_cast<int64_t>(block.first + row) * d + column] = value;
  }
}

// The finishers take turns, round after round of the multiprocessor.
template <int kBuffers>
__device__ inline void finish_run(const MoeDecodeArgs& a, const Workspace& w, const Run& run,
                                  const RowBlock& block, const Split& k, const float4* buffers,
                                  Ring<kBuffers>& in, int& turn) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tiles = (block.count + kTokensOfTile - 1) / kTokensOfTile;
  for (int task = 0; task < run.count; task += k.groups, in.advance()) {
    if (turn-- != 0) continue;
    turn = kFinishers - 1;
    const int tasks = min(k.groups, run.count - task);
    in.wait_full();
    for (int group = 0; group < tasks; ++group) {
      for (int n = 0; n < tiles; ++n) {
        const float4* from = buffers + ((in.place * kWarps + group * k.parts) * kMaxTiles + n) * 32 + lane;
        float4 sum = *from;
#pragma unroll 4
        for (int part = 1; part < k.parts; ++part) {  // the parts of K, in order
          const float4 more = from[part * kMaxTiles * 32];
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        if (run.down) {
          finish_down(a, w, block, run.tile + task + group, n, sum);
        } else {
          finish_gate_up(a, w, block, run.tile + task + group, n, sum);
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(in.empty + in.place);
      add_release(run.down ? w.finished : w.ready + run.block, static_cast<uint32_t>(tasks));
    }
  }
}

// Once all products of down are there: a token's experts are added in the order of a.
__device__ inline void combine(const MoeDecodeArgs& a, const Workspace& w, int blocks) {
  const MoeShape& s = a.shape;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int d = s.model_chunks() * 128;
  const uint32_t all = static_cast<uint32_t>(blocks) * static_cast<uint32_t>(tiles_of(s, true));
  if (lane == 0) {
    while (load_relaxed(w.finished) < all) __nanosleep(20);
  }
  __syncwarp();
  const int64_t pieces = int64_t{a.tokens} * (d / 128);
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t piece = warp * int64_t{gridDim.x} + blockIdx.x; piece < pieces; piece += step) {
    const int64_t t = piece / (d / 128);
    const int column = static_cast<int>(piece % (d / 128)) * 128 + lane * 4;
    float4 sum = {0, 0, 0, 0};
    for (int first = 0; first < s.chosen; first += 8) {  // eight loads under way, added in order
      float4 part[8];
      float weight[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (first + c >= s.chosen) continue;
        const int64_t row = w.grouped_row[t * s.chosen + first + c];
        weight[c] = a.weights[t * a.weights_stride + first + c];
        part[c] = __ldcg(reinterpret_cast<const float4*>(w.partial + row * d + column));
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (first + c >= s.chosen) continue;
        sum.x += weight[c] * part[c].x, sum.y += weight[c] * part[c].y;
        sum.z += weight[c] * part[c].z, sum.w += weight[c] * part[c].w;
      }
    }
    float* out = a.out + t * a.out_stride + column;
    if (column < s.model) out[0] = sum.x;
    if (column + 1 < s.model) out[1] = sum.y;
    if (column + 2 < s.model) out[2] = sum.z;
    if (column + 3 < s.model) out[3] = sum.w;
  }
}

template <int kBlock, int kBuffers>
__global__ void __launch_bounds__(kThreads, 1) moe_layer(MoeDecodeArgs a, Workspace w) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = SharedLayout<kBlock, kBuffers>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + Layout::kBarriers);
  Ring<kStages> chunks{barriers, barriers + kStages};
  Ring<kBuffers> sums{barriers + 2 * kStages, barriers + 2 * kStages + kBuffers};
  float4* const buffers = reinterpret_cast<float4*>(shared + Layout::kSums);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(chunks.full + i, 1), barrier_init(chunks.empty + i, kWarps);
    for (int i = 0; i < kBuffers; ++i) barrier_init(sums.full + i, kWarps), barrier_init(sums.empty + i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_wait();
  dependency_launch();

  const int blocks = *w.blocks;
  Runs runs{w};
  if (warp < kWarps) {
    more_registers<kMultiplyRegisters>();
    for (Run run; runs.next(a.shape, run);) {
      const RowBlock block = w.block[run.block];
      const Split k(a.shape, run.down);
      if (block.count <= kTokensOfTile) {
        multiply_run<kBlock, 1>(a, w, run, block, k, shared, chunks, buffers, sums);
      } else {
        multiply_run<kBlock, 2>(a, w, run, block, k, shared, chunks, buffers, sums);
      }
    }
    combine(a, w, blocks);
  } else {
    fewer_registers<kOtherRegisters>();
    int turn = warp - kLoader - 1;
    for (Run run; runs.next(a.shape, run);) {
      const RowBlock block = w.block[run.block];
      const Split k(a.shape, run.down);
      if (warp != kLoader) {
        finish_run(a, w, run, block, k, buffers, sums, turn);
      } else if (lane == 0) {
        load_run<kBlock>(run, block, k, shared, chunks);
      }
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
  device.multiprocessors = std::min(device.multiprocessors, kMaxMultiprocessors);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  return error;
}

template <int kBlock, int kBuffers>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kBytes = SharedLayout<kBlock, kBuffers>::kBytes;
  const auto kernel = moe_layer<kBlock, kBuffers>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  launch_early(kernel, device.multiprocessors, kThreads, kBytes, stream, args,
               workspace_at(static_cast<char*>(args.workspace), args.shape, args.tokens));
  return cudaGetLastError();
}

template <int kBlock>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kBuffers = 8, kFewBuffers = 2;
  if (device.shared_bytes >= SharedLayout<kBlock, kBuffers>::kBytes)
    return launch_layer<kBlock, kBuffers>(args, device, stream);
  return launch_layer<kBlock, kFewBuffers>(args, device, stream);
}

}  // namespace

cudaError_t moe_decode(const MoeDecodeArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  Device device;
  cudaError_t error = current_device(device);
  if (error == cudaSuccess) error = group_rows(args, device.multiprocessors, stream);
  if (error != cudaSuccess) return error;
  return args.shape.block == 16 ? launch_layer<16>(args, device, stream)
                                : launch_layer<32>(args, device, stream);
}

}  // namespace nibble::cuda
