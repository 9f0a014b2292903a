// Products of rows with weights in tiles (tile_linear.h): microseconds; bytes of the weights against what the
// device reads at most, measured in the same run; operations of the product as asked for (the device does
// twice as many, for a row goes in as two bfloat16 numbers). Shapes of Laguna-S-2.1. --json as in bench.cuh.
//
//   linear_bench [--json] [KIND [ROWS]]: all, or one kind of weights (BF16, BF16-in-12, NVFP4), or one number
//   of rows of it.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "bench.cuh"
#include "ops/cuda/tile_linear.h"

using namespace nibble;
using namespace nibble::cuda;

__global__ void fill(uint32_t* p, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    uint32_t x = (static_cast<uint32_t>(i) + seed) * 2654435761u;
    x ^= x >> 15;
    p[i] = (x & 0x007F007Fu) | 0x3C003C00u | (x & 0x80008000u);  // bfloat16 of about 2^-7
  }
}
// Bfloat16 of a normal distribution, as trained weights are: some are far smaller than most.
__global__ void fill_normal(uint16_t* p, int64_t n) {
  auto random = [](uint64_t i) {
    i *= 0x9E3779B97F4A7C15ull;
    i ^= i >> 32;
    i *= 0xD6E8FEB86659FD93ull;
    return (static_cast<float>(i >> 40) + 0.5f) * 0x1p-24f;
  };
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    const float value = 0.02f * sqrtf(-2 * logf(random(2 * i + 1))) * cospif(2 * random(2 * i + 2));
    p[i] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
  }
}
__global__ void __launch_bounds__(512) read_all(const uint4* from, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t step = gridDim.x * 512ll;
  int64_t i = blockIdx.x * 512ll + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678) *sink = sum;
}

int main(int argc, char** argv) {
  Report report(argc, argv);
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, 0) != cudaSuccess)
    return std::fprintf(report.text, "skipped: no GPU\n"), report.finish(), 0;
  CHECK(cudaStreamCreate(&stream));
  constexpr int64_t kBytes = int64_t{4} << 30, kMaxRows = 1024, kMaxK = 9216, kMaxN = 100352;
  uint8_t* weights = nullptr;
  uint16_t* codes = nullptr;  // from which weights in 12 bits are made
  int* does_not_fit = nullptr;
  float *x = nullptr, *out = nullptr;
  void* workspace = nullptr;
  CHECK(cudaMalloc(&workspace, tile_linear_workspace_bytes(TileKind::kBF16, kMaxRows, kMaxK)));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&weights), kBytes));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&codes), kBytes / 2 * 3));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&does_not_fit), sizeof(int)));
  CHECK(cudaMemset(does_not_fit, 0, sizeof(int)));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&x), kMaxRows * kMaxK * 4));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&out), kMaxRows * kMaxN * 4));
  fill<<<2048, 256>>>(reinterpret_cast<uint32_t*>(weights), kBytes / 4, 1);
  fill_normal<<<2048, 256>>>(codes, kBytes / 4 * 3);
  fill<<<2048, 256>>>(reinterpret_cast<uint32_t*>(x), kMaxRows * kMaxK, 2);
  CHECK(cudaDeviceSynchronize());
  const double read = time_us(1, true, [&](int) {
                        read_all<<<p.multiProcessorCount * 2, 512, 0, stream>>>(
                            reinterpret_cast<uint4*>(weights), kBytes / 16, reinterpret_cast<uint32_t*>(out));
                      }).median;
  const double ceiling = kBytes / read / 1e3;
  report.set_ceiling(p.name, ceiling);
  std::fprintf(report.text, "%s, read ceiling %.0f GB/s\n", p.name, ceiling);
  struct Shape {
    const char* name;
    std::vector<int64_t> n;
    int64_t k;
  };
  const Shape shapes[] = {{"q k v gate", {9216, 1024, 1024, 72}, 3072},
                          {"output", {3072}, 9216},
                          {"dense gate up", {12288, 12288}, 3072},
                          {"router", {256}, 3072},
                          {"head", {kMaxN}, 3072}};
  for (TileKind kind : {TileKind::kBF16, TileKind::kBF16In12, TileKind::kNvfp4, TileKind::kQ4}) {
    const char* const name = tile_kind_name(kind);
    if (argc > 1 && std::string_view(argv[1]) != name) continue;
    report.head(name);
    for (const Shape& shape : shapes) {
      int64_t bytes = 0, n_all = 0;
      for (int64_t n : shape.n) bytes += tile_bytes(kind, n, shape.k), n_all += n;
      const int sets = static_cast<int>(std::min<int64_t>(kBytes / bytes, 40));
      if (kind == TileKind::kBF16In12) {
        const int64_t pairs = sets * bytes / tile_bytes(kind, 32, shape.k);
        const Matrix all{.format = MatrixFormat::kBF16, .n = pairs * 32, .k = shape.k, .codes = codes};
        CHECK(make_tiles(kind, all, weights, does_not_fit, stream));
        int failed = 0;
        CHECK(cudaMemcpyAsync(&failed, does_not_fit, sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (failed != 0) return std::printf("weights do not fit in 12 bits\n"), 1;
      }
      for (int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
        if (argc > 2 && std::atoll(argv[2]) != rows) continue;
        const Timing us = time_us(rows <= 64 ? sets : std::min(sets, 6), true, [&](int i) {
          TileLinear args{.x = x, .x_stride = shape.k, .rows = rows, .k = shape.k, .workspace = workspace};
          const uint8_t* at = weights + i * bytes;
          for (int64_t n : shape.n) {
            args.products[args.count++] = {.tiles = at, .out = out, .out_stride = n, .n = n};
            at += tile_bytes(kind, n, shape.k);
          }
          CHECK(tile_linear(kind, args, stream));
        });
        report.row({.name = shape.name,
                    .rows = rows,
                    .bytes = static_cast<double>(bytes),
                    .operations = 2.0 * static_cast<double>(rows * n_all * shape.k),
                    .us = us});
      }
    }
  }
  report.finish();
  return 0;
}
