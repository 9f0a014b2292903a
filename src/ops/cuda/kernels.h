// The operations as launches on a stream: everything that nvcc compiles, behind plain functions. All pointers
// are the device's but those that say host; nothing here waits for the device or allocates.
//
// Grids depend on shapes that the host knows, never on what the device holds (positions, ids, counts), so
// that a captured launch serves any step of the same shapes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/activation.h"
#include "ops/cuda/device_matrix.h"
#include "ops/mixer_args.h"
#include "ops/op_args.h"

namespace nibble::cuda {

// Compute capabilities are 90 for 9.0 here. From this one on products with weights may be on tensor cores,
// and kernels may start while the one before still ends.
inline constexpr int kHopper = 90;
// For which one the code was compiled that runs on the current device: its own or an earlier one. An error
// where this build has none. (rows.cu)
cudaError_t find_kernels(int& compiled_for);

// rows.cu
void embed(cudaStream_t stream, const int32_t* ids_T, const Matrix& table_VD, Rows<float> out);
void gather(cudaStream_t stream, Rows<const float> x, const int32_t* indices, Rows<float> out);
void write_kv(cudaStream_t stream, Rows<const float> k, Rows<const float> v, const RowsOfStep& rows,
              const KvView& kv);
void rope_table(cudaStream_t stream, const int32_t* positions_T, const float* inv_freq, float factor,
                Rows<float> out);
void rope(cudaStream_t stream, Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style,
          int64_t offset);
void gate_output(cudaStream_t stream, OutputGate kind, Rows<const float> gate, int64_t head_dim,
                 Rows<float> x);
void activate(cudaStream_t stream, const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up,
              Rows<float> out);
void add(cudaStream_t stream, Rows<const float> y, Rows<float> x);
void add_bias(cudaStream_t stream, Rows<float> x, const float* bias);
void copy(cudaStream_t stream, Rows<const float> x, Rows<float> out);

// norms.cu
void rms_norm(cudaStream_t stream, Rows<const float> x, const float* weight, float eps, Rows<float> out);
void layer_norm(cudaStream_t stream, Rows<const float> x, const float* weight, const float* bias, float eps,
                Rows<float> out);

// linear.cu. Several products of rows and matrices at once; group i takes matrix i.
struct GroupedLinear {
  DeviceMatrix single;                  // of the one group, where `table` is null
  const DeviceMatrix* table = nullptr;  // [matrices]; of any formats: a launch does those of one
  const int32_t* active = nullptr;      // [groups] which matrix a group takes; below 0: none; null: its own
  // The rows of out that are a matrix's: begin[i] to begin[i + 1]; null: all rows.
  const int32_t* begin = nullptr;
  const int32_t* x_row = nullptr;  // the row of x of each row of out; null: the same
  const float* x_scale = nullptr;  // of each row of out, multiplied on its sums; null: none
  Rows<const float> x;
  Rows<float> out;
  int64_t x_step = 0, out_step = 0;  // elements from a group's columns to the next group's
};
// Matrices are [n, k] (all of them) in `format`; about `rows_a_group` rows belong to a group.
void grouped_linear(cudaStream_t stream, MatrixFormat format, const GroupedLinear& linear, int64_t groups,
                    int64_t n, int64_t k, int64_t rows_a_group);

// prepare_attend.cu
void prepare_attend(cudaStream_t stream, const PrepareAttendArgs& args);

// attend.cu, attend_many.cu (prompts). `selection` null: all visible positions. `prepare` null: q, the keys
// and the values are prepared; else that is done here, too, for rows that are one_a_sequence: then positions,
// page tables and earlier keys and values are read before the kernel before is done, so they come from
// uploads and from steps before. `scratch` has room for `scratch_rows` times attend_row_scratch elements: so
// many rows are done at once. `arrived` has a place for each head of those rows, zero, and zero again
// afterwards.
int64_t attend_row_scratch(const AttendArgs& args, const Selection* selection);
void attend(cudaStream_t stream, const AttendArgs& args, const Selection* selection,
            const PrepareAttendArgs* prepare, float* scratch, int64_t scratch_rows, uint32_t* arrived);

// select.cu. `scores` has index_select_scratch elements.
int64_t index_select_scratch(const IndexSelectArgs& args);
void index_select(cudaStream_t stream, const IndexSelectArgs& args, uint32_t* scores);

// top_logits.cu; `keys`: room for top_logits_scratch() of them.
int64_t top_logits_scratch(int64_t rows, int64_t vocab);
void top_logits(cudaStream_t stream, Rows<const float> logits, Rows<TokenLogit> out, uint64_t* keys);

// recurrent.cu
void causal_conv(cudaStream_t stream, const CausalConvArgs& args);
void kda(cudaStream_t stream, const KdaArgs& args);

// streams.cu
void hyper_weights(cudaStream_t stream, const HyperSpec& spec, const float* base, const float* scale,
                   Rows<float> mix);
void hyper_collect(cudaStream_t stream, const HyperSpec& spec, Rows<const float> streams,
                   Rows<const float> mix, Rows<float> out);
void hyper_distribute(cudaStream_t stream, const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                      Rows<float> streams);
void hyper_mean(cudaStream_t stream, const HyperSpec& spec, Rows<const float> streams, Rows<float> out);

// read.cu. Reads all bytes, for its time; REQUIRES a multiple of read_all_unit(multiprocessors).
int64_t read_all_unit(int multiprocessors);
void read_all(cudaStream_t stream, const void* data, int64_t bytes, int multiprocessors, uint32_t* sink);

// route.cu
void route(cudaStream_t stream, const RouteArgs& args);

// experts.cu
// The order of the routed rows of a step by (expert, token, rank): what grouped_linear needs, and where each
// (token, rank) went.
struct Grouping {
  int32_t* begin = nullptr;   // [E + 1] first row of each expert
  int32_t* active = nullptr;  // [min(E, R)] the experts that have rows, then -1
  int32_t* token = nullptr;   // [R] of each row
  int32_t* expert = nullptr;  // [R] of each row
  int32_t* row_of = nullptr;  // [R] of each (token, rank)
};
void group_by_expert(cudaStream_t stream, Rows<const int32_t> ids, int64_t experts, const Grouping& grouping);
// Rows on their way into a product of W4A4: in NVFP4 without their second-level scale, and that scale. Row i
// of out comes from row x_row[i] of x (null: i); experts [E] have the input scales. out may be x.
void round_rows(cudaStream_t stream, ActScale scale, const DeviceMatrix* experts, const int32_t* expert,
                Rows<const float> x, const int32_t* x_row, Rows<float> out, float* out_scale);
// out[t] = sum over a of weights[t, a] * down[row_of(t, a)], in the order of a.
void combine(cudaStream_t stream, Rows<const float> weights, Rows<const float> down, const Grouping& grouping,
             Rows<float> out);

}  // namespace nibble::cuda
