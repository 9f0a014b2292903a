// Operations on each element of some rows: embedding, copies, the cache's writes, rotary, gates, activation,
// sums. All read and write each element once.
#include "ops/cuda/common.cuh"
#include "ops/cuda/decode.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace nibble::cuda {
namespace {

template <MatrixFormat kFormat>
__global__ void embed_kernel(const int32_t* ids, DeviceMatrix table, Rows<float> out) {
  after_kernel_before();
  using Decode = Decoder<kFormat>;
  const int64_t column = this_column() * Decode::kColumns;
  if (column >= out.cols) return;
  const int64_t id = ids[this_row()];
  float weights[Decode::kColumns];
  Decode::run(code_row(table, id), scale_row(table, id), column, table.k, weights);
  float* row = out.data + this_row() * out.stride;
#pragma unroll
  for (int i = 0; i < Decode::kColumns; ++i) {
    if (column + i < out.cols) row[column + i] = weights[i] * table.tensor_scale;
  }
}

// operation(row, column) on every element.
template <class Operation>
__global__ void element_kernel(int64_t cols, Operation operation) {
  after_kernel_before();
  if (this_column() < cols) operation(this_row(), this_column());
}
template <class Operation>
void for_elements(cudaStream_t stream, const char* name, int64_t rows, int64_t cols, Operation operation) {
  if (rows == 0 || cols == 0) return;
  launch_early(element_kernel<Operation>, element_grid(rows, cols), kElementThreads, 0, stream, cols,
               operation);
  check_launch(name, rows, cols);
}

}  // namespace

// All kernels are compiled for the same ones.
cudaError_t find_kernels(int& compiled_for) {
  cudaFuncAttributes attributes = {};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, embed_kernel<MatrixFormat::kF32>);
  (void)cudaGetLastError();  // told by the caller, not by the next launch
  compiled_for = attributes.ptxVersion;
  return error;
}

void embed(cudaStream_t stream, const int32_t* ids_T, const Matrix& table_VD, Rows<float> out) {
  if (out.rows == 0) return;
  with_format(table_VD.format, [&]<MatrixFormat kFormat>() {
    const int64_t runs = ceil_div(out.cols, Decoder<kFormat>::kColumns);
    launch_early(embed_kernel<kFormat>, element_grid(out.rows, runs), kElementThreads, 0, stream, ids_T,
                 device_matrix(table_VD), out);
  });
  check_launch("embed", out.rows, table_VD.n, table_VD.k);
}

void gather(cudaStream_t stream, Rows<const float> x, const int32_t* indices, Rows<float> out) {
  for_elements(stream, "gather", out.rows, out.cols, [=] __device__(int64_t row, int64_t column) {
    out.data[row * out.stride + column] = x.data[indices[row] * x.stride + column];
  });
}

// The heads of x, `dim` wide, to their places in the keys or the values.
static void write_heads(cudaStream_t stream, Rows<const float> x, const RowsOfStep& rows, const KvView& kv,
                        int64_t dim, float* cache) {
  for_elements(stream, "write_kv", x.rows, x.cols, [=] __device__(int64_t row, int64_t column) {
    const int64_t at = token_index(kv, rows.slots_T[row], rows.positions_T[row], column / dim);
    cache[at * dim + column % dim] = x.data[row * x.stride + column];
  });
}
void write_kv(cudaStream_t stream, Rows<const float> k, Rows<const float> v, const RowsOfStep& rows,
              const KvView& kv) {
  write_heads(stream, k, rows, kv, kv.head_dim, kv.keys);
  write_heads(stream, v, rows, kv, kv.value_width(), kv.values);
}

void rope_table(cudaStream_t stream, const int32_t* positions_T, const float* inv_freq, float factor,
                Rows<float> out) {
  const int64_t half = out.cols / 2;
  for_elements(stream, "rope_table", out.rows, half, [=] __device__(int64_t row, int64_t i) {
    // The angle is rounded to float32, as rope_table.h says; its functions are not.
    const float angle = static_cast<float>(positions_T[row]) * inv_freq[i];
    double sine, cosine;
    sincos(static_cast<double>(angle), &sine, &cosine);
    out.data[row * out.stride + i] = static_cast<float>(cosine) * factor;
    out.data[row * out.stride + half + i] = static_cast<float>(sine) * factor;
  });
}

void rope(cudaStream_t stream, Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style,
          int64_t offset) {
  const int64_t half = table.cols / 2, heads = x.cols / head_dim;
  const bool halves = style == RopeStyle::kHalves;
  const int64_t step = halves ? 1 : 2, partner = halves ? half : 1;
  for_elements(stream, "rope", x.rows, heads * half, [=] __device__(int64_t row, int64_t pair) {
    const int64_t i = pair % half;
    const float cosine = table.data[row * table.stride + i], sine = table.data[row * table.stride + half + i];
    float* first = x.data + row * x.stride + pair / half * head_dim + offset + i * step;
    const float a = first[0], b = first[partner];
    first[0] = a * cosine - b * sine;
    first[partner] = b * cosine + a * sine;
  });
}

void gate_output(cudaStream_t stream, OutputGate kind, Rows<const float> gate, int64_t head_dim,
                 Rows<float> x) {
  const bool by_head = kind == OutputGate::kSoftplusHead;
  for_elements(stream, "gate_output", x.rows, x.cols, [=] __device__(int64_t row, int64_t column) {
    const float g = gate.data[row * gate.stride + (by_head ? column / head_dim : column)];
    x.data[row * x.stride + column] *= gate_factor(kind, g);
  });
}

void activate(cudaStream_t stream, const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up,
              Rows<float> out) {
  for_elements(
      stream, "activate", out.rows, out.cols, [=, spec = spec] __device__(int64_t row, int64_t column) {
        out.data[row * out.stride + column] =
            activated(spec, gate.data[row * gate.stride + column], up.data[row * up.stride + column]);
      });
}

void add(cudaStream_t stream, Rows<const float> y, Rows<float> x) {
  for_elements(stream, "add", x.rows, x.cols, [=] __device__(int64_t row, int64_t column) {
    x.data[row * x.stride + column] += y.data[row * y.stride + column];
  });
}

void add_bias(cudaStream_t stream, Rows<float> x, const float* bias) {
  for_elements(stream, "add_bias", x.rows, x.cols, [=] __device__(int64_t row, int64_t column) {
    x.data[row * x.stride + column] += bias[column];
  });
}

void copy(cudaStream_t stream, Rows<const float> x, Rows<float> out) {
  for_elements(stream, "copy", x.rows, x.cols, [=] __device__(int64_t row, int64_t column) {
    out.data[row * out.stride + column] = x.data[row * x.stride + column];
  });
}

}  // namespace nibble::cuda
