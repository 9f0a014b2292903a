// Routed experts on the GPU: checks moe_decode against a plain float64 product, its bits against themselves,
// and its time against what the device can read. Prints a table; the last lines are the summary. Bytes are
// those of the distinct experts of a step, codes and scales.
//
//   moe_layer_bench [--json] [LETTERS [FORMAT]]: c checks, r with routing, t times of a layer, p one launch
//   of each, for ncu; without letters c, r and t. FORMAT: NVFP4 (if none is given), MXFP4, q4 or BF16
//   moe_layer_bench m E,A,D,I,FORMAT...: prints, for $NIBBLE_MOE_PATHS or ~/.cache/nibble/moe_paths.json, up
//   to how many tokens the kernel for few rows is faster, without a shared expert
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "moe_layer.cuh"

__device__ double value(DiskMatrix m, int64_t row, int k, int c, TileKind kind) {
  if (kind == TileKind::kBF16) {
    const uint32_t bits = reinterpret_cast<const uint16_t*>(m.codes)[row * k + c];
    return __uint_as_float(bits << 16);
  }
  const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const int code = m.codes[row * (k / 2) + c / 2] >> (c % 2 * 4) & 15, block = block_columns(kind);
  const int64_t at = row * (k / block) + c / block;
  if (kind == TileKind::kQ4)
    return ((code ^ 8) - 8) * double{__half2float(reinterpret_cast<const __half*>(m.scales)[at])};
  const int s = m.scales[at];
  double scale;
  if (kind == TileKind::kNvfp4) {
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
    g += value(gate, row, s.model, c, s.kind) * x[c];
    u += value(up, row, s.model, c, s.kind) * x[c];
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
  for (int c = threadIdx.x; c < s.width; c += 128) v += value(down, blockIdx.x, s.width, c, s.kind) * h[c];
  sums[threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.x != 0) return;
  v = 0;
  for (int i = 0; i < 128; ++i) v += sums[i];
  out[blockIdx.x] += v * scale;
}

int failures = 0;
std::FILE* text = stdout;  // Report::text
void report(bool ok, const std::string& what) {
  std::fprintf(text, "%-6s %s\n", ok ? "ok" : "FAILED", what.c_str());
  failures += ok ? 0 : 1;
}

TileKind kind = TileKind::kNvfp4;  // of times
bool kind_of(const char* name, TileKind& of) {
  for (TileKind known : {TileKind::kNvfp4, TileKind::kMxfp4, TileKind::kQ4, TileKind::kBF16}) {
    if (std::strcmp(name, tile_kind_name(known)) == 0) return of = known, true;
  }
  return std::fprintf(stderr, "wanted NVFP4, MXFP4, q4 or BF16, found %s\n", name), false;
}

void check(MoeShape s, int tokens, uint32_t seed, const std::string& name, bool one_expert = false) {
  std::mt19937 random(seed);
  Layer layer(s, seed);
  s = layer.shape;
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
  std::snprintf(line, sizeof line, "%s: E %d A %d D %d I %d, %d tokens: relative error %.2e", name.c_str(),
                s.experts, s.chosen, s.model, s.width, tokens, relative);
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
  layer.release();
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

double expert_bytes(const MoeShape& s) {
  if (s.kind == TileKind::kBF16) return 6.0 * s.model * s.width;
  return 3.0 * s.model * s.width * (0.5 + 1.0 * block_scale_bytes(s.kind) / block_columns(s.kind));
}
double operations(const MoeShape& s, int tokens) { return 2.0 * 3 * s.model * s.width * tokens * s.chosen; }
std::string name_of(const std::string& what, double experts) {
  char name[100];
  std::snprintf(name, sizeof name, "%s, %.1f experts", what.c_str(), experts);
  return name;
}
double count_distinct(std::vector<int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  return static_cast<double>(std::unique(ids.begin(), ids.end()) - ids.begin());
}

// GB/s that the device reads of the repacked experts themselves, at most.
double read_ceiling(const Layer& layer, int multiprocessors) {
  const MoeShape& s = layer.shape;
  uint32_t* sink = device<uint32_t>(1);
  std::vector<const uint4*> pieces;
  for (const PackedExpert& e : layer.packed) pieces.push_back(reinterpret_cast<const uint4*>(e.gate_up));
  const uint4** d_pieces = device(pieces);
  const int64_t each = s.gate_up_bytes() / 16;
  double ceiling = 0;
  for (int count : {8, 16, 32, 64, s.experts / 2, s.experts}) {
    for (int blocks : {2, 3, 4}) {
      const Timing t = time_us(s.experts / count, true, [&](int i) {
        read_pieces<<<multiprocessors * blocks, 512, 0, stream>>>(d_pieces + i * count, each, count, sink);
      });
      const double rate = count * static_cast<double>(s.gate_up_bytes()) / t.median / 1e3;
      ceiling = std::max(ceiling, rate);
      if (blocks == 4 || count == s.experts)
        std::fprintf(text, "read %3d pieces of %.2f MB, %d blocks an SM: %7.1f us, %6.0f GB/s\n", count,
                     s.gate_up_bytes() / 1e6, blocks, t.median, rate);
    }
  }
  std::fprintf(text, "read ceiling %.0f GB/s; launch %.2f us, graph node %.2f us\n", ceiling,
               time_us(200, false, [&](int) { nothing<<<1, 32, 0, stream>>>(); }).median,
               time_us(200, true, [&](int) { nothing<<<1, 32, 0, stream>>>(); }).median);
  CHECK(cudaFree(d_pieces));
  CHECK(cudaFree(sink));
  return ceiling;
}

// With the router's logits given: rows that differ, so that L2 holds no experts.
void routed_times(const cudaDeviceProp& p, Report& results) {
  Layer layer({256, 10, 3072, 1024, kind}, 78);
  const MoeShape& s = layer.shape;
  results.set_ceiling(p.name, read_ceiling(layer, p.multiProcessorCount));
  results.head(std::string("routing and experts, ") + tile_kind_name(kind));
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (int tokens : {1, 2, 4, 8, 16}) {
    const int count = std::max(8, 32 / tokens);
    const Room room(s, tokens);
    std::vector<float> logits(static_cast<size_t>(count) * tokens * s.experts);
    for (float& v : logits) v = normal(random);
    double distinct = 0;  // experts of a step: those of the largest logits
    for (int i = 0; i < count; ++i) {
      std::vector<int32_t> ids, all(s.experts);
      for (int e = 0; e < s.experts; ++e) all[e] = e;
      for (int t = 0; t < tokens; ++t) {
        const float* of_row = logits.data() + (static_cast<size_t>(i) * tokens + t) * s.experts;
        std::partial_sort(all.begin(), all.begin() + s.chosen, all.end(),
                          [&](int32_t a, int32_t b) { return of_row[a] > of_row[b]; });
        ids.insert(ids.end(), all.begin(), all.begin() + s.chosen);
      }
      distinct += count_distinct(ids) / count;
    }
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
    results.row({.name = name_of("E 256 A 10 M = " + std::to_string(tokens), distinct),
                 .rows = tokens,
                 .bytes = distinct * expert_bytes(s),
                 .operations = operations(s, tokens),
                 .us = t});
    CHECK(cudaFree(const_cast<float*>(d_logits)));
  }
}

int measure_crossovers(const char* device_name, int count, char** layers) {
  std::string json;
  for (int i = 0; i < count && has_wgmma(); ++i) {
    MoeShape s;
    char format[8] = "";
    if (std::sscanf(layers[i], "%d,%d,%d,%d,%7s", &s.experts, &s.chosen, &s.model, &s.width, format) != 5 ||
        s.chosen > s.experts)
      return std::fprintf(stderr, "wanted E,A,D,I,FORMAT, found %s\n", layers[i]), 1;
    if (!kind_of(format, s.kind)) return 1;
    if (s.kind == TileKind::kBF16) return std::fprintf(stderr, "BF16 has the kernels for many alone\n"), 1;
    Layer layer(s, 79);
    std::mt19937 random(7);
    int most_few = 15;  // or the most of these tokens where it is not slower
    for (int tokens : {16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048}) {
      const Step step = make_step(s, tokens, random);
      auto time = [&](int few_up_to) {
        layer.shape.most_few = few_up_to;
        const Room room(layer.shape, tokens);
        return time_us(4, true, [&](int) { CHECK(moe_decode(args_of(layer, step, room), stream)); }).median;
      };
      const double few = time(INT_MAX), many = time(0);
      if (few <= many) most_few = tokens;
      std::fprintf(stderr, "%4d tokens: few %8.1f us, many %8.1f us\n", tokens, few, many);
      CHECK(cudaFree(step.d_x));
      CHECK(cudaFree(step.d_out));
    }
    layer.release();
    json += (i > 0 ? ",\n \"" : "\"") + crossover_key(device_name, s) + "\": " + std::to_string(most_few);
  }
  return std::printf("{%s}\n", json.c_str()) < 0;
}

int main(int argc, char** argv) {
  Report results(argc, argv);
  text = results.text;
  const bool checks = argc < 2 || std::strstr(argv[1], "c") != nullptr;
  const bool times = argc < 2 || std::strstr(argv[1], "t") != nullptr;
  const bool routed = argc < 2 || std::strstr(argv[1], "r") != nullptr;
  const bool profile = argc > 1 && std::strstr(argv[1], "p") != nullptr;  // one launch of each, for ncu
  if (argc > 2 && argv[1][0] != 'm' && !kind_of(argv[2], kind)) return 1;
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, 0) != cudaSuccess)
    return std::fprintf(text, "skipped: no GPU\n"), results.finish(), 0;
  if (argc > 2 && argv[1][0] == 'm') {
    CHECK(cudaStreamCreate(&stream));
    return measure_crossovers(p.name, argc - 2, argv + 2);
  }
  if (kind == TileKind::kBF16 && !has_wgmma()) return std::fprintf(stderr, "BF16 wants wgmma\n"), 1;
  std::fprintf(text, "%s, sm_%d%d, %d SMs, L2 %.0f MB\n", p.name, p.major, p.minor, p.multiProcessorCount,
               p.l2CacheSize / 1e6);
  CHECK(cudaStreamCreate(&stream));
  if (checks) {
    check({16, 4, 256, 256}, 3, 1, "small");
    check({5, 2, 400, 208}, 9, 2, "tails");
    check({257, 9, 144, 96}, 40, 3, "many experts");
    check({4, 2, 512, 384}, 65, 4, "one expert", true);
    check({9, 3, 416, 224, TileKind::kMxfp4}, 33, 5, "mxfp4");
    check({12, 4, 4096, 2048}, 20, 6, "large");
    check({3, 2, 4480, 1088}, 13, 7, "wider than what registers hold");
    check({16, 4, 256, 256}, 80, 8, "many rows");
    check({5, 2, 400, 208}, 70, 9, "many rows, tails");
    check({7, 3, 416, 224, TileKind::kMxfp4}, 200, 10, "many rows, mxfp4");
    check({12, 4, 4096, 2048}, 100, 11, "many rows, large");
    check({3, 2, 4480, 1088}, 90, 12, "many rows, wide");
    check({9, 3, 416, 224, TileKind::kQ4}, 33, 13, "q4");
    check({12, 4, 4096, 2048, TileKind::kQ4}, 20, 14, "q4, large");
    check({3, 2, 4480, 1088, TileKind::kQ4}, 5, 15, "q4, wider than what registers hold");
    check({7, 3, 416, 224, TileKind::kQ4}, 200, 16, "many rows, q4");
    if (has_wgmma()) {
      check({7, 3, 400, 208, TileKind::kBF16}, 70, 18, "bf16");
      check({12, 4, 4096, 2048, TileKind::kBF16}, 100, 19, "bf16, large");
    }
    check({12, 4, 4096, 2048, TileKind::kQ4}, 300, 17, "many rows, q4, large");
  }
  if (routed) routed_times(p, results);
  if (times) {
    Layer layer({288, 8, 4096, 2048, kind}, 77);
    const MoeShape& s = layer.shape;
    results.set_ceiling(p.name, read_ceiling(layer, p.multiProcessorCount));
    std::mt19937 random(5);
    results.head(std::string("routed experts, W4A16, ") + tile_kind_name(kind));
    auto row = [&](const std::string& name, const std::vector<std::vector<int32_t>>& id_sets, int tokens) {
      std::vector<Step> steps;
      const Room room(s, tokens);
      double distinct = 0;
      for (const auto& ids : id_sets) {
        steps.push_back(make_step(s, tokens, random, &ids));
        distinct += count_distinct(ids) / static_cast<double>(id_sets.size());
      }
      auto work = [&](int i) { CHECK(moe_decode(args_of(layer, steps[i], room), stream)); };
      const int count = static_cast<int>(steps.size());
      results.row({.name = name_of(name, distinct),
                   .rows = tokens,
                   .bytes = distinct * expert_bytes(s),
                   .operations = operations(s, tokens),
                   .us = time_us(count, true, work),
                   .eager = time_us(count, false, work)});
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
    for (int rows : {1, 2, 4, 8, 16, 32, 64}) {
      // Every expert gets `rows` rows.
      const int tokens = 36 * rows;
      std::vector<int32_t> ids;
      for (int t = 0; t < tokens; ++t)
        for (int a = 0; a < 8; ++a) ids.push_back((t % 36) * 8 + a);
      row(std::to_string(rows) + " rows each", {ids}, tokens);
    }
  }
  if (profile) {
    Layer layer({288, 8, 4096, 2048, kind}, 77);
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
  std::fprintf(text, failures == 0 ? "all checks passed\n" : "%d CHECKS FAILED\n", failures);
  results.finish();
  return failures == 0 ? 0 : 1;
}
