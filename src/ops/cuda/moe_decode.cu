#include <algorithm>

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/moe_workspace.h"
#include "ops/cuda/primitives.cuh"
#include "ops/cuda/tile_decode.cuh"

namespace nibble::cuda {
namespace {

#ifndef MOE_STAGES
#define MOE_STAGES 5
#endif
#ifndef MOE_BUFFERS
#define MOE_BUFFERS 8
#endif

constexpr int kWarps = 8;      // that multiply: two warp groups
constexpr int kHeld = 4;       // chunks of such a warp whose operands stay in registers
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

// The runs of this multiprocessor: its share of all pairs of tiles of gate and up, then of down. Of down, those
// of its first block come last: that block is shared with the multiprocessor before, which was at its part of
// it only now.
struct Runs {
  int blocks, segment = -1, at = 0, end = 0;

  __device__ bool next(const MoeShape& s, Run& run) {
    while (at == end) {
      if (++segment == 3) return false;
      const int tiles = tiles_of(s, segment > 0);
      const int all = blocks * tiles, me = static_cast<int>(blockIdx.x), of = static_cast<int>(gridDim.x);
      at = all / of * me + min(all % of, me);
      end = all / of * (me + 1) + min(all % of, me + 1);
      const int middle = min(end, (at + tiles - 1) / tiles * tiles);
      if (segment == 1) at = middle;
      if (segment == 2) end = middle;
    }
    const int tiles = tiles_of(s, segment > 0);
    run = {segment > 0, at / tiles, at % tiles, 0};
    run.count = min(end - at, tiles - run.tile);
    at += run.count;
    return true;
  }
  static __device__ int tiles_of(const MoeShape& s, bool down) {
    return down ? s.model_chunks() * 4 : s.width_chunks() * 8;
  }
};

// How K is cut over the warps: warp p of a group takes chunks p, p + parts, ... It depends on K alone.
struct Split {
  int chunks, parts = 1, groups, rows;  // rows: chunks of a warp, at most
  __device__ Split(const MoeShape& s, bool down) : chunks(down ? s.width_chunks() : s.model_chunks()) {
    while (parts < kWarps && chunks > parts * kHeld) parts *= 2;
    groups = kWarps / parts;
    rows = (chunks + parts - 1) / parts;
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
template <int kBlock, int kStages, int kBuffers>
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

// sums[tile][n] += the products of a chunk. release(): this lane has read the chunk.
template <int kBlock, int kTiles, class Release>
__device__ inline void multiply(const uint8_t* chunk, const uint32_t (&b)[kTiles][16],
                                float (&sums)[2][kTiles][4], Release release) {
  const int lane = threadIdx.x % 32;
  constexpr int kScales = 32 / kBlock;  // of a row
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    uint4 codes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[half] = *reinterpret_cast<const uint4*>(chunk + tile * kTileCodeBytes + half * 512 + lane * 16);
    }
    const uint8_t* at = chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(kBlock) + lane * 2 * kScales;
    uint32_t scales;
    if constexpr (kBlock == 16) {
      scales = *reinterpret_cast<const uint32_t*>(at);
    } else {
      scales = *reinterpret_cast<const uint16_t*>(at);
    }
    if (tile == 1) release();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t weights[2][8], scale[2];
      scale[0] = scale_pair<kBlock>(scales, part);
      scale[1] = high_twice(scale[0]);
      scale[0] = low_twice(scale[0]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& word = codes[half];
        uint32_t pairs[2][4];
        decode(part == 0 ? word.x : word.z, pairs[0]);
        decode(part == 0 ? word.y : word.w, pairs[1]);
#pragma unroll
        for (int p = 0; p < 8; ++p) weights[half][p] = mul_bf16x2(pairs[p / 4][p % 4], scale[half]);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_bf16(sums[tile][n], weights[0][2 * m], weights[1][2 * m], weights[0][2 * m + 1],
                   weights[1][2 * m + 1], b[n][part * 8 + 2 * m], b[n][part * 8 + 2 * m + 1]);
        }
      }
    }
  }
}

// The tasks of a run go in rounds, one to each group of warps. The chunks of a row of K, and of all groups,
// are a stage.
template <int kBlock, int kStages>
__device__ inline void load_run(const Run& run, const RowBlock& block, const Split& k, uint8_t* stages,
                                Ring<kStages>& ring) {
  constexpr int kChunk = chunk_bytes(kBlock);
  const uint64_t policy = evict_first_policy();
  const uint8_t* from = (run.down ? block.down : block.gate_up) + int64_t{run.tile} * k.chunks * kChunk;
  for (int task = 0; task < run.count; task += k.groups) {
    const int tasks = min(k.groups, run.count - task);
    for (int first = 0; first < k.chunks; first += k.parts) {
      const int bytes = min(k.parts, k.chunks - first) * kChunk;
      ring.wait_empty();
      barrier_expect(ring.full + ring.place, bytes * tasks);
      for (int group = 0; group < tasks; ++group) {
        bulk_copy(stages + (ring.place * kWarps + group * k.parts) * kChunk,
                  from + (int64_t{task + group} * k.chunks + first) * kChunk, bytes, ring.full + ring.place,
                  policy);
      }
      ring.advance();
    }
  }
}

template <int kBlock, int kTiles, int kStages, int kBuffers>
__device__ inline void multiply_run(const MoeDecodeArgs& a, const Workspace& w, const Run& run,
                                    const RowBlock& block, const Split& k, const uint8_t* stages,
                                    Ring<kStages>& ring, float4* buffers, Ring<kBuffers>& out) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
  const int group = warp / k.parts, part = warp % k.parts;
  const int own_rows = (k.chunks - part + k.parts - 1) / k.parts;
  const int d = a.shape.model_chunks() * 128, i = a.shape.width_chunks() * 128;
  if (run.down) {
    if (lane == 0) {
      while (load_relaxed(w.ready + run.block) < static_cast<uint32_t>(Runs::tiles_of(a.shape, false)))
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
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        if (row + c >= k.rows) break;
        ring.wait_full();
        auto release = [&] {
          __syncwarp();
          if (lane == 0) barrier_arrive(ring.empty + ring.place);
        };
        if (row + c < mine) {
          multiply<kBlock, kTiles>(stages + (ring.place * kWarps + warp) * chunk_bytes(kBlock), b[c], sums,
                                   release);
        } else {
          release();
        }
        ring.advance();
      }
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

__device__ inline void finish_down(const MoeDecodeArgs& a, const Workspace& w, const RowBlock& block, int tile,
                                   int n, const float4& sums) {
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
  const uint32_t all = static_cast<uint32_t>(blocks) * static_cast<uint32_t>(Runs::tiles_of(s, true));
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

template <int kBlock, int kStages, int kBuffers>
__global__ void __launch_bounds__(kThreads, 1) moe_layer(MoeDecodeArgs a, Workspace w) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Layout = SharedLayout<kBlock, kStages, kBuffers>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + Layout::kBarriers);
  Ring<kStages> chunks{barriers, barriers + kStages};
  Ring<kBuffers> sums{barriers + 2 * kStages, barriers + 2 * kStages + kBuffers};
  float4* const buffers = reinterpret_cast<float4*>(shared + Layout::kSums);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(chunks.full + i, 1), barrier_init(chunks.empty + i, kWarps);
    for (int i = 0; i < kBuffers; ++i) barrier_init(sums.full + i, kWarps), barrier_init(sums.empty + i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_wait();
  dependency_launch();

  const int blocks = *w.blocks;
  Runs runs{blocks};
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
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  return error;
}

template <int kBlock, int kStages, int kBuffers>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kBytes = SharedLayout<kBlock, kStages, kBuffers>::kBytes;
  const auto kernel = moe_layer<kBlock, kStages, kBuffers>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  launch_early(kernel, device.multiprocessors, kThreads, kBytes, stream, args,
               workspace_at(static_cast<char*>(args.workspace), args.shape, args.tokens));
  return cudaGetLastError();
}

template <int kBlock>
cudaError_t launch_layer(const MoeDecodeArgs& args, const Device& device, cudaStream_t stream) {
#ifndef MOE_NO_SMALL
  if (device.shared_bytes < SharedLayout<kBlock, MOE_STAGES, MOE_BUFFERS>::kBytes)
    return launch_layer<kBlock, 2, 1>(args, device, stream);
#endif
  return launch_layer<kBlock, MOE_STAGES, MOE_BUFFERS>(args, device, stream);
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
