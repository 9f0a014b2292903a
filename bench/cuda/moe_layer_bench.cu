// Routed experts on the GPU: checks moe_decode against a plain float64 product, its bits against themselves,
// and its time against what the device can read. Prints a table; the last lines are the summary.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
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
// NVFP4: subnormal codes to 2, now and then negative. MXFP4: 2^-15 to 2.
__global__ void fill_scales(uint8_t* p, int64_t n, uint64_t seed, int block) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    const uint32_t r = hash(seed + i);
    p[i] = block == 16 ? (r & 0x3F) | ((r >> 8) % 16 == 0 ? 0x80 : 0) : 112 + r % 17;
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

  Layer(MoeShape s, uint64_t seed) : shape(s) {
    auto matrix = [&](int64_t n, int64_t k) {
      uint8_t *codes = device<uint8_t>(n * k / 2), *scales = device<uint8_t>(n * k / s.block);
      fill_codes<<<1024, 256>>>(codes, n * k / 2, seed += 1ull << 40);
      fill_scales<<<1024, 256>>>(scales, n * k / s.block, seed += 1ull << 40, s.block);
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
};

__device__ double value(DiskMatrix m, int64_t row, int k, int c, int block) {
  const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const int code = m.codes[row * (k / 2) + c / 2] >> (c % 2 * 4) & 15;
  const int s = m.scales[row * (k / block) + c / block];
  double scale;
  if (block == 16) {
    const int e = s >> 3 & 15, f = s & 7;
    scale = e == 0 ? ldexp(f / 8.0, -6) : ldexp(1 + f / 8.0, e - 7);
    if (s & 0x80) scale = -scale;
  } else {
    scale = ldexp(1.0, s - 127);
  }
  return (code & 8 ? -1 : 1) * magnitudes[code & 7] * scale;
}
// One block a (row, output): float64.
__global__ void plain_gate_up(DiskMatrix gate, DiskMatrix up, MoeShape s, float gate_scale, float up_scale,
                              const float* x, double* h) {
  __shared__ double sums[2][128];
  const int row = blockIdx.x;
  double g = 0, u = 0;
  for (int c = threadIdx.x; c < s.model; c += 128) {
    g += value(gate, row, s.model, c, s.block) * x[c];
    u += value(up, row, s.model, c, s.block) * x[c];
  }
  sums[0][threadIdx.x] = g, sums[1][threadIdx.x] = u;
  __syncthreads();
  if (threadIdx.x != 0) return;
  g = u = 0;
  for (int i = 0; i < 128; ++i) g += sums[0][i], u += sums[1][i];
  g *= gate_scale, u *= up_scale;
  h[row] = g / (1 + exp(-g)) * u;
}
__global__ void plain_down(DiskMatrix down, MoeShape s, double scale, const double* h, double* out) {
  __shared__ double sums[128];
  double v = 0;
  for (int c = threadIdx.x; c < s.width; c += 128) v += value(down, blockIdx.x, s.width, c, s.block) * h[c];
  sums[threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.x != 0) return;
  v = 0;
  for (int i = 0; i < 128; ++i) v += sums[i];
  out[blockIdx.x] += v * scale;
}

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

int failures = 0;
void report(bool ok, const std::string& what) {
  std::printf("%-6s %s\n", ok ? "ok" : "FAILED", what.c_str());
  failures += ok ? 0 : 1;
}

void check(MoeShape s, int tokens, uint32_t seed, const std::string& name, bool one_expert = false) {
  std::mt19937 random(seed);
  Layer layer(s, seed);
  std::vector<int32_t> ids(static_cast<size_t>(tokens) * s.chosen, 1);
  Step step = make_step(s, tokens, random, one_expert ? &ids : nullptr);
  const Room room(s, tokens);
  CHECK(moe_decode(args_of(layer, step, room), 0));
  const std::vector<float> found = result(layer, step);
  double *h = device<double>(s.width), *sum = device<double>(s.model);
  double error = 0, norm = 0;
  for (int t : {0, tokens / 2, tokens - 1}) {
    CHECK(cudaMemset(sum, 0, s.model * 8));
    for (int a = 0; a < s.chosen; ++a) {
      const int e = step.ids[t * s.chosen + a];
      const PackedExpert& p = layer.packed[e];
      plain_gate_up<<<s.width, 128>>>(layer.raw[e].gate, layer.raw[e].up, s, p.gate_scale, p.up_scale,
                                      step.d_x + static_cast<int64_t>(t) * s.model, h);
      plain_down<<<s.model, 128>>>(layer.raw[e].down, s,
                                   double{p.down_scale} * step.weights[t * s.chosen + a], h, sum);
    }
    std::vector<double> wanted(s.model);
    CHECK(cudaMemcpy(wanted.data(), sum, s.model * 8, cudaMemcpyDeviceToHost));
    for (int c = 0; c < s.model; ++c) {
      const double f = found[static_cast<size_t>(t) * s.model + c];
      error += (f - wanted[c]) * (f - wanted[c]), norm += wanted[c] * wanted[c];
    }
  }
  const double relative = std::sqrt(error / norm);
  char line[200];
  std::snprintf(line, sizeof line, "%s: E %d A %d D %d I %d block %d, %d tokens: relative error %.2e",
                name.c_str(), s.experts, s.chosen, s.model, s.width, s.block, tokens, relative);
  report(relative < 3e-5, line);

  // Each row alone, and in another step: the same bits.
  bool same = true;
  for (int t = 0; t < tokens; t += 1 + tokens / 40) {
    CHECK(cudaMemset(step.d_out, 0xFF, found.size() * 4));
    CHECK(moe_decode(args_of(layer, step, room, t, 1), 0));
    same = same && std::memcmp(result(layer, step).data() + static_cast<size_t>(t) * s.model,
                               found.data() + static_cast<size_t>(t) * s.model, s.model * 4) == 0;
  }
  report(same, name + ": each row alone gives the same bits");
  same = true;
  for (int run = 0; run < 5; ++run) {
    CHECK(cudaMemset(step.d_out, 0xFF, found.size() * 4));
    CHECK(moe_decode(args_of(layer, step, room), 0));
    same = same && std::memcmp(result(layer, step).data(), found.data(), found.size() * 4) == 0;
  }
  report(same, name + ": five runs give the same bits");
  std::vector<uint32_t> handed(static_cast<size_t>(moe_decode_handed(s, tokens)));
  CHECK(cudaMemcpy(handed.data(), room.handed, handed.size() * 4, cudaMemcpyDeviceToHost));
  report(std::count(handed.begin(), handed.end(), 0u) == static_cast<int64_t>(handed.size()),
         name + ": what is handed on is zero again");
  for (Raw& r : layer.raw) {
    for (const uint8_t* p :
         {r.gate.codes, r.gate.scales, r.up.codes, r.up.scales, r.down.codes, r.down.scales})
      CHECK(cudaFree(const_cast<uint8_t*>(p)));
  }
  for (PackedExpert& p : layer.packed) {
    CHECK(cudaFree(const_cast<uint8_t*>(p.gate_up)));
    CHECK(cudaFree(const_cast<uint8_t*>(p.down)));
  }
}

__global__ void __launch_bounds__(512)
    read_pieces(const uint4* const* pieces, int64_t each, int count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t total = each * count, step = static_cast<int64_t>(gridDim.x) * 512;
  int64_t id = blockIdx.x * 512ll + threadIdx.x;
  for (; id + 7 * step < total; id += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t at = id + i * step;
      v[i] = __ldcs(pieces[at / each] + at % each);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  for (; id < total; id += step) {
    const uint4 v = __ldcs(pieces[id / each] + id % each);
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678) *sink = sum;
}
__global__ void nothing() {}

// With the router's logits given: rows that differ, so that L2 holds no experts.
void routed_times() {
  Layer layer({256, 10, 3072, 1024, 16}, 78);
  const MoeShape& s = layer.shape;
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (int tokens : {1, 2, 4, 8, 16}) {
    const int count = std::max(8, 32 / tokens);
    const Room room(s, tokens);
    std::vector<float> logits(static_cast<size_t>(count) * tokens * s.experts);
    for (float& v : logits) v = normal(random);
    const float* d_logits = device(logits);
    Step step = make_step(s, tokens, random);
    const Timing t = time_us(count, true, [&](int i) {
      RouteArgs route;
      route.logits = {d_logits + int64_t{i} * tokens * s.experts, tokens, s.experts};
      route.ids = {step.d_ids, tokens, s.chosen};
      route.weights = {step.d_weights, tokens, s.chosen};
      MoeDecodeArgs a = args_of(layer, step, room);
      a.route = &route;
      CHECK(moe_decode(a, stream));
    });
    std::printf("routing and experts, E %d A %d D %d I %d, M = %d: %.1f us (%.1f to %.1f)\n", s.experts,
                s.chosen, s.model, s.width, tokens, t.median, t.low, t.high);
    CHECK(cudaFree(const_cast<float*>(d_logits)));
  }
}

int main(int argc, char** argv) {
  const bool checks = argc < 2 || std::strstr(argv[1], "c") != nullptr;
  const bool times = argc < 2 || std::strstr(argv[1], "t") != nullptr;
  const bool routed = argc < 2 || std::strstr(argv[1], "r") != nullptr;
  const bool profile = argc > 1 && std::strstr(argv[1], "p") != nullptr;  // one launch of each, for ncu
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, 0) != cudaSuccess) return std::printf("skipped: no GPU\n"), 0;
  std::printf("%s, sm_%d%d, %d SMs, L2 %.0f MB\n", p.name, p.major, p.minor, p.multiProcessorCount,
              p.l2CacheSize / 1e6);
  CHECK(cudaStreamCreate(&stream));
  if (checks) {
    check({16, 4, 256, 256, 16}, 3, 1, "small");
    check({5, 2, 400, 208, 16}, 9, 2, "tails");
    check({257, 9, 144, 96, 16}, 40, 3, "many experts");
    check({4, 2, 512, 384, 16}, 65, 4, "one expert", true);
    check({9, 3, 416, 224, 32}, 33, 5, "mxfp4");
    check({12, 4, 4096, 2048, 16}, 20, 6, "large");
    check({3, 2, 4480, 1088, 16}, 13, 7, "wider than what registers hold");
  }
  if (routed) routed_times();
  if (times) {
    Layer layer({288, 8, 4096, 2048, 16}, 77);
    const MoeShape& s = layer.shape;
    const double expert_bytes = 3.0 * s.model * s.width * 9 / 16;
    uint32_t* sink = device<uint32_t>(1);
    // Ceilings: reading the repacked experts themselves.
    std::vector<const uint4*> pieces;
    for (const PackedExpert& e : layer.packed) pieces.push_back(reinterpret_cast<const uint4*>(e.gate_up));
    const uint4** d_pieces = device(pieces);
    const int64_t each = s.gate_up_bytes() / 16;
    double ceiling = 0;
    for (int count : {8, 16, 32, 64, 144, 288}) {
      for (int blocks : {2, 3, 4}) {
        const int rounds = 288 / count;
        Timing t = time_us(rounds, true, [&](int i) {
          read_pieces<<<p.multiProcessorCount * blocks, 512, 0, stream>>>(d_pieces + i * count, each, count,
                                                                          sink);
        });
        const double rate = count * static_cast<double>(s.gate_up_bytes()) / t.median / 1e3;
        ceiling = std::max(ceiling, rate);
        if (blocks == 4 || count == 288)
          std::printf("read %3d pieces of %.2f MB, %d blocks an SM: %7.1f us, %6.0f GB/s\n", count,
                      s.gate_up_bytes() / 1e6, blocks, t.median, rate);
      }
    }
    std::printf("read ceiling %.0f GB/s; launch %.2f us, graph node %.2f us\n", ceiling,
                time_us(200, false, [&](int) { nothing<<<1, 32, 0, stream>>>(); }).median,
                time_us(200, true, [&](int) { nothing<<<1, 32, 0, stream>>>(); }).median);
    std::mt19937 random(5);
    std::printf("%-28s %8s %9s %9s %9s %8s %7s %9s\n", "routed experts, NVFP4 W4A16", "experts", "graph us",
                "low", "high", "GB/s", "share", "eager us");
    auto row = [&](const std::string& name, const std::vector<std::vector<int32_t>>& id_sets, int tokens) {
      std::vector<Step> steps;
      const Room room(s, tokens);
      double distinct = 0;
      for (const auto& ids : id_sets) {
        steps.push_back(make_step(s, tokens, random, &ids));
        std::vector<int32_t> sorted = ids;
        std::sort(sorted.begin(), sorted.end());
        distinct += static_cast<double>(std::unique(sorted.begin(), sorted.end()) - sorted.begin());
      }
      distinct /= static_cast<double>(id_sets.size());
      auto work = [&](int i) { CHECK(moe_decode(args_of(layer, steps[i], room), stream)); };
      const int count = static_cast<int>(steps.size());
      const Timing g = time_us(count, true, work), e = time_us(count, false, work);
      const double rate = distinct * expert_bytes / g.median / 1e3;
      std::printf("%-28s %8.1f %9.1f %9.1f %9.1f %8.0f %6.1f%% %9.1f\n", name.c_str(), distinct, g.median,
                  g.low, g.high, rate, 100 * rate / ceiling, e.median);
      for (Step& step : steps) {
        CHECK(cudaFree(step.d_x));
        CHECK(cudaFree(step.d_out));
      }
    };
    for (int tokens : {1, 2, 4, 8, 16, 32, 64}) {
      // Experts of all steps of a round: each once as far as possible, so that L2 holds none of them.
      const int sets = std::max(4, 36 / tokens);
      std::vector<std::vector<int32_t>> id_sets;
      std::vector<int32_t> all(288), deck;
      for (int e = 0; e < 288; ++e) all[e] = e;
      for (int i = 0; i < sets; ++i) {
        std::vector<int32_t> ids;
        for (int t = 0; t < tokens; ++t) {
          if (tokens == 1) {
            if (deck.empty()) {
              deck = all;
              std::shuffle(deck.begin(), deck.end(), random);
            }
            ids.insert(ids.end(), deck.end() - 8, deck.end());
            deck.resize(deck.size() - 8);
          } else {
            std::shuffle(all.begin(), all.end(), random);
            ids.insert(ids.end(), all.begin(), all.begin() + 8);
          }
        }
        id_sets.push_back(ids);
      }
      row("M = " + std::to_string(tokens), id_sets, tokens);
    }
    for (int rows : {1, 2, 4, 8, 16}) {
      // Every expert gets `rows` rows.
      const int tokens = 36 * rows;
      std::vector<int32_t> ids;
      for (int t = 0; t < tokens; ++t)
        for (int a = 0; a < 8; ++a) ids.push_back((t % 36) * 8 + a);
      row("all experts, " + std::to_string(rows) + " rows each", {ids}, tokens);
    }
  }
  if (profile) {
    Layer layer({288, 8, 4096, 2048, 16}, 77);
    std::mt19937 random(5);
    const Room room(layer.shape, 36 * 8);
    for (int rows : {0, 1, 8}) {
      std::vector<int32_t> ids;
      const int tokens = std::max(1, 36 * rows);
      for (int t = 0; t < tokens; ++t)
        for (int a = 0; a < 8; ++a) ids.push_back((t % 36) * 8 + a);
      Step step = make_step(layer.shape, tokens, random, &ids);
      CHECK(moe_decode(args_of(layer, step, room), stream));
      CHECK(cudaDeviceSynchronize());
    }
  }
  std::printf(failures == 0 ? "all checks passed\n" : "%d CHECKS FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}
