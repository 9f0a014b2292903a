// Products of rows and weight matrices in any format, one or many matrices a launch: linear, the heads of
// linear_heads, the experts of a layer.
//
// A warp takes kCols weight rows and kRows rows of x at a time; a lane adds up, for each pair, the runs of
// Decoder::kColumns columns that start at lane * kColumns, and every 32 runs further; a fixed tree adds the
// lanes. Few long rows (is_wide: the mix of residual streams has 24 of 16384) would keep few warps busy, so
// there a block takes what a warp takes else, each warp every eighth run of 32, and adds its warps in their
// order. So an output has the same bits for any number of rows, alone or in a group: kRows and kCols only say
// what is read once for several sums. Few rows are bound by the bytes of the weights, many by float32 FMA and
// the reads of x.
#include "base/numbers.h"
#include "ops/cuda/common.cuh"
#include "ops/cuda/decode.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 8;  // of a block

bool is_wide(int64_t n, int64_t k) { return n <= 256 && k >= 2048; }

// Four values of x from `column`; zero behind the row.
__device__ inline float4 load_x(const float* x, int64_t column, int64_t k) {
  if (column + 4 <= k) {
    if (is_aligned(x + column)) return *reinterpret_cast<const float4*>(x + column);
    return {x[column], x[column + 1], x[column + 2], x[column + 3]};
  }
  return {column < k ? x[column] : 0.0f, column + 1 < k ? x[column + 1] : 0.0f,
          column + 2 < k ? x[column + 2] : 0.0f, 0.0f};
}

// kPartners: warps that share a row's columns.
template <MatrixFormat kFormat, int kRows, int kCols, int kPartners>
__global__ void __launch_bounds__(kWarps* kWarp) grouped_linear_kernel(GroupedLinear p) {
  __shared__ float s_sums[kPartners][kRows][kCols];
  after_kernel_before();
  using Decode = Decoder<kFormat>;
  constexpr int kRun = Decode::kColumns;
  const int64_t group = blockIdx.z, matrix = p.active != nullptr ? p.active[group] : group;
  if (matrix < 0) return;
  const DeviceMatrix w = p.table != nullptr ? p.table[matrix] : p.single;
  if (w.format != kFormat) return;
  const int64_t first = p.begin != nullptr ? p.begin[matrix] : 0;
  const int64_t last = p.begin != nullptr ? p.begin[matrix + 1] : p.out.rows;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, partner = warp % kPartners;
  const int64_t n0 = (int64_t{blockIdx.x} * (kWarps / kPartners) + warp / kPartners) * kCols;
  if (n0 >= w.n) return;
  const uint8_t *codes[kCols], *scales[kCols];
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
    const int64_t n = n0 + c < w.n ? n0 + c : w.n - 1;  // computed in vain, not stored
    codes[c] = code_row(w, n);
    scales[c] = scale_row(w, n);
  }

  for (int64_t row0 = first + int64_t{blockIdx.y} * kRows; row0 < last; row0 += int64_t{gridDim.y} * kRows) {
    const float* x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = row0 + r < last ? row0 + r : last - 1;
      x[r] = p.x.data + (p.x_row != nullptr ? p.x_row[row] : row) * p.x.stride + group * p.x_step;
    }
    float sums[kRows][kCols] = {};
#pragma unroll(kRows == 1 ? 4 : 1)  // loads under way
    for (int64_t column = (partner * kWarp + lane) * kRun; column < w.k; column += kPartners * kWarp * kRun) {
      float weights[kCols][kRun];
#pragma unroll
      for (int c = 0; c < kCols; ++c) Decode::run(codes[c], scales[c], column, w.k, weights[c]);
#pragma unroll
      for (int i = 0; i < kRun; i += 4) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 four = load_x(x[r], column + i, w.k);
#pragma unroll
          for (int c = 0; c < kCols; ++c) {
            sums[r][c] = fmaf(weights[c][i], four.x, sums[r][c]);
            sums[r][c] = fmaf(weights[c][i + 1], four.y, sums[r][c]);
            sums[r][c] = fmaf(weights[c][i + 2], four.z, sums[r][c]);
            sums[r][c] = fmaf(weights[c][i + 3], four.w, sums[r][c]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        sums[r][c] = warp_sum(sums[r][c]);
        if (kPartners > 1 && lane == 0) s_sums[partner][r][c] = sums[r][c];
      }
    }
    if constexpr (kPartners > 1) {
      static_assert(kPartners == kWarps);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        float value = sums[r][c];
        if constexpr (kPartners > 1) {
          value = 0;
          for (int i = 0; i < kPartners; ++i) value += s_sums[i][r][c];
        }
        value *= w.tensor_scale;
        if (lane != 0 || partner != 0 || row0 + r >= last || n0 + c >= w.n) continue;
        if (p.x_scale != nullptr) value *= p.x_scale[row0 + r];
        if (w.bias != nullptr) value += w.bias[n0 + c];
        p.out.data[(row0 + r) * p.out.stride + group * p.out_step + n0 + c] = value;
      }
    }
    if constexpr (kPartners > 1) __syncthreads();
  }
}

template <MatrixFormat kFormat, int kRows, int kCols, int kPartners = 1>
void launch(cudaStream_t stream, const GroupedLinear& linear, int64_t groups, int64_t n,
            int64_t rows_a_group) {
  // Twice the blocks that rows spread evenly would need, and each goes on to what is left.
  const int64_t row_blocks =
      linear.begin != nullptr ? ceil_div(2 * rows_a_group, kRows) : ceil_div(linear.out.rows, kRows);
  constexpr int64_t kMostRowBlocks = 65535;
  const dim3 grid(static_cast<unsigned>(ceil_div(n, kWarps / kPartners * kCols)),
                  static_cast<unsigned>(row_blocks < kMostRowBlocks ? row_blocks : kMostRowBlocks),
                  static_cast<unsigned>(groups));
  launch_early(grouped_linear_kernel<kFormat, kRows, kCols, kPartners>, grid, kWarps * kWarp, 0, stream,
               linear);
}

}  // namespace

void grouped_linear(cudaStream_t stream, MatrixFormat format, const GroupedLinear& linear, int64_t groups,
                    int64_t n, int64_t k, int64_t rows_a_group) {
  if (linear.out.rows == 0 || groups == 0) return;
  with_format(format, [&]<MatrixFormat kFormat>() {
    if (is_wide(n, k)) {
      if (rows_a_group <= 8) return launch<kFormat, 1, 1, kWarps>(stream, linear, groups, n, rows_a_group);
      return launch<kFormat, 8, 4, kWarps>(stream, linear, groups, n, rows_a_group);
    }
    if (rows_a_group <= 1) {
      launch<kFormat, 1, 2>(stream, linear, groups, n, rows_a_group);
    } else {
      launch<kFormat, 8, 4>(stream, linear, groups, n, rows_a_group);
    }
  });
  check_launch("linear", linear.out.rows, n, k);
}

}  // namespace nibble::cuda
