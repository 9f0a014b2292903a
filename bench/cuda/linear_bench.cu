// Products of rows with weights in tiles (tile_linear.h): microseconds; bytes of the weights against what the
// device reads at most, measured in the same run; operations of the product as asked for (the device does
// twice as many, for a row goes in as two bfloat16 numbers). Shapes of Laguna-S-2.1. --json as in bench.cuh.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
  float *x = nullptr, *out = nullptr;
  void* workspace = nullptr;
  CHECK(cudaMalloc(&workspace, tile_linear_workspace_bytes(MatrixFormat::kBF16, kMaxRows, kMaxK)));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&weights), kBytes));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&x), kMaxRows * kMaxK * 4));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&out), kMaxRows * kMaxN * 4));
  fill<<<2048, 256>>>(reinterpret_cast<uint32_t*>(weights), kBytes / 4, 1);
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
  for (auto [format, name] : {std::pair{MatrixFormat::kBF16, "BF16"}, {MatrixFormat::kNvfp4, "NVFP4"}}) {
    report.head(name);
    for (const Shape& shape : shapes) {
      int64_t bytes = 0, n_all = 0;
      for (int64_t n : shape.n) bytes += tile_bytes(format, n, shape.k), n_all += n;
      const int sets = static_cast<int>(std::min<int64_t>(kBytes / bytes, 40));
      for (int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
        const Timing us = time_us(rows <= 64 ? sets : std::min(sets, 6), true, [&](int i) {
          TileLinear args{.x = x, .x_stride = shape.k, .rows = rows, .k = shape.k, .workspace = workspace};
          const uint8_t* at = weights + i * bytes;
          for (int64_t n : shape.n) {
            args.products[args.count++] = {.tiles = at, .out = out, .out_stride = n, .n = n};
            at += tile_bytes(format, n, shape.k);
          }
          CHECK(tile_linear(format, args, stream));
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
