// A layer of routed experts and steps through it, made up on the device: what moe_layer_bench runs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "bench.cuh"
#include "ops/cuda/moe_decode.h"

using namespace nibble;
using namespace nibble::cuda;

template <class T>
T* device(int64_t count) {
  void* p = nullptr;
  CHECK(cudaMalloc(&p, static_cast<size_t>(count * static_cast<int64_t>(sizeof(T)))));
  return static_cast<T*>(p);
}
template <class T>
T* device(const std::vector<T>& host) {
  T* p = device<T>(static_cast<int64_t>(host.size()));
  CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

__device__ uint32_t hash(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}
__global__ void fill_codes(uint8_t* p, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) p[i] = hash(seed + i);
}
// Bytes. NVFP4: subnormal codes to 2, now and then negative. MXFP4: 2^-15 to 2. q4: 2^-15 to 1, either sign.
// BF16: 2^-7 to 2, either sign.
__global__ void fill_scales(TileKind kind, uint8_t* p, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    const uint32_t r = hash(seed + i);
    p[i] = kind == TileKind::kNvfp4   ? (r & 0x3F) | ((r >> 8) % 16 == 0 ? 0x80 : 0)
           : kind == TileKind::kMxfp4 ? 112 + r % 17
           : i % 2 == 0               ? r
           : kind == TileKind::kBF16  ? (r & 0x80) | (0x3C + r % 4)
                                      : (r & 0x80) | r % 0x3C;
  }
}

struct Raw {
  DiskMatrix gate, up, down;
};

struct Layer {
  MoeShape shape;
  std::vector<Raw> raw;
  std::vector<PackedExpert> packed;
  PackedExpert* table = nullptr;

  Layer(MoeShape s, uint64_t seed) : shape(has_wgmma() ? with_many(s) : s) {
    auto matrix = [&](int64_t n, int64_t k) {
      if (s.kind == TileKind::kBF16) {
        uint8_t* codes = device<uint8_t>(n * k * 2);
        fill_scales<<<1024, 256>>>(s.kind, codes, n * k * 2, seed += 1ull << 40);
        return DiskMatrix{codes, nullptr};
      }
      const int64_t scale_bytes = n * k / block_columns(s.kind) * block_scale_bytes(s.kind);
      uint8_t *codes = device<uint8_t>(n * k / 2), *scales = device<uint8_t>(scale_bytes);
      fill_codes<<<1024, 256>>>(codes, n * k / 2, seed += 1ull << 40);
      fill_scales<<<1024, 256>>>(s.kind, scales, scale_bytes, seed += 1ull << 40);
      return DiskMatrix{codes, scales};
    };
    for (int e = 0; e < s.experts; ++e) {
      Raw r = {matrix(s.width, s.model), matrix(s.width, s.model), matrix(s.model, s.width)};
      uint8_t *gate_up = device<uint8_t>(s.gate_up_bytes()), *down = device<uint8_t>(s.down_bytes());
      CHECK(cudaMemset(gate_up, 0xFF, s.gate_up_bytes()));
      CHECK(cudaMemset(down, 0xFF, s.down_bytes()));
      CHECK(repack_gate_up(s, r.gate, r.up, gate_up, 0));
      CHECK(repack_down(s, r.down, down, 0));
      raw.push_back(r);
      const float scale = 0.01f * static_cast<float>(1 + e % 5);
      packed.push_back({gate_up, down, 4 * scale, scale, 0.02f});
    }
    table = device(packed);
    CHECK(cudaDeviceSynchronize());
  }
  void release() {
    for (Raw& r : raw) {
      for (const DiskMatrix& m : {r.gate, r.up, r.down})
        for (const uint8_t* bytes : {m.codes, m.scales}) CHECK(cudaFree(const_cast<uint8_t*>(bytes)));
    }
    for (PackedExpert& e : packed)
      for (const uint8_t* bytes : {e.gate_up, e.down}) CHECK(cudaFree(const_cast<uint8_t*>(bytes)));
  }
};

struct Step {
  int tokens;
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
  float *d_x, *d_weights, *d_out;
  int32_t* d_ids;
};

Step make_step(const MoeShape& s, int tokens, std::mt19937& random,
               const std::vector<int32_t>* ids = nullptr) {
  Step step;
  step.tokens = tokens;
  std::normal_distribution<float> normal;
  step.x.resize(static_cast<size_t>(tokens) * s.model);
  step.weights.resize(static_cast<size_t>(tokens) * s.chosen);
  for (float& v : step.x) v = normal(random);
  for (float& v : step.weights) v = 0.1f + 0.2f * std::fabs(normal(random));
  if (ids != nullptr) {
    step.ids = *ids;
  } else {
    std::vector<int32_t> all(s.experts);
    for (int e = 0; e < s.experts; ++e) all[e] = e;
    for (int t = 0; t < tokens; ++t) {
      std::shuffle(all.begin(), all.end(), random);
      step.ids.insert(step.ids.end(), all.begin(), all.begin() + s.chosen);
    }
  }
  step.d_x = device(step.x);
  step.d_weights = device(step.weights);
  step.d_ids = device(step.ids);
  step.d_out = device<float>(static_cast<int64_t>(tokens) * s.model);
  CHECK(cudaMemset(step.d_out, 0xFF, static_cast<size_t>(tokens) * s.model * 4));
  return step;
}

// What a launch needs beside its step.
struct Room {
  void* workspace;
  int64_t workspace_bytes;
  uint32_t* handed;

  Room(const MoeShape& s, int tokens) : workspace_bytes(moe_decode_workspace_bytes(s, tokens)) {
    workspace = device<char>(workspace_bytes);
    handed = device(std::vector<uint32_t>(static_cast<size_t>(moe_decode_handed(s, tokens))));
    CHECK(cudaMemset(workspace, 0xFF, workspace_bytes));
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() {
    CHECK(cudaFree(workspace));
    CHECK(cudaFree(handed));
  }
};

MoeDecodeArgs args_of(const Layer& layer, const Step& step, const Room& room, int first = 0, int count = -1) {
  const MoeShape& s = layer.shape;
  MoeDecodeArgs a;
  a.shape = s;
  a.experts = layer.table;
  a.tokens = count < 0 ? step.tokens : count;
  a.x = step.d_x + static_cast<int64_t>(first) * s.model, a.x_stride = s.model;
  a.ids = step.d_ids + first * s.chosen, a.ids_stride = s.chosen;
  a.weights = step.d_weights + first * s.chosen, a.weights_stride = s.chosen;
  a.out = step.d_out + static_cast<int64_t>(first) * s.model, a.out_stride = s.model;
  a.workspace = room.workspace;
  a.handed = room.handed;
  return a;
}

std::vector<float> result(const Layer& layer, const Step& step) {
  CHECK(cudaDeviceSynchronize());
  std::vector<float> out(static_cast<size_t>(step.tokens) * layer.shape.model);
  CHECK(cudaMemcpy(out.data(), step.d_out, out.size() * 4, cudaMemcpyDeviceToHost));
  return out;
}
