// Weights on their way to the device, into the order that its kernels want, and where they are then.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ops/cuda/device.h"
#include "ops/cuda/device_matrix.h"
#include "ops/cuda/moe_path.h"
#include "ops/memory.h"
#include "ops/ops.h"

namespace nibble::cuda {

// Matrices in a table on the device.
struct MatrixTable {
  Buffer device;  // DeviceMatrix each
  std::vector<MatrixFormat> formats;
};

class CudaExperts final : public PlacedExperts {
 public:
  explicit CudaExperts(std::vector<ExpertWeights> experts) : PlacedExperts(std::move(experts)) {}

  // Repacked for the tensor cores; null: the rest is used.
  std::optional<MoeShape> tensor;
  Buffer packed_table;  // PackedExpert each

  MatrixTable gate, up, down;
  Buffer begin, active;  // of a Grouping, of the step that runs
};

// What is placed lives as long as this.
class CudaWeights {
 public:
  // `tensor_cores` of BackendOptions.
  CudaWeights(Memory& memory, cudaStream_t stream, Device device, std::string tensor_cores,
              MoePaths paths = {});

  // As Ops::place and Ops::place_experts.
  Result<Matrix> place(const Matrix& host_matrix, MatrixUse use);
  Result<std::unique_ptr<PlacedExperts>> place_experts(std::span<const ExpertWeights> host_experts,
                                                       ExpertsOf whose);
  Result<MatrixTable> make_table(const std::vector<DeviceMatrix>& matrices);

 private:
  Result<std::unique_ptr<PlacedExperts>> place_packed(std::span<const ExpertWeights> host_experts);
  // The tiles of a matrix, of which codes and scales are on the device, in 12 bits if that is asked for and
  // can be.
  Result<Buffer> make_tiles_of(Matrix& uploaded);
  // Whether it is of a format for tiles and can be in them; the first that only is of one is warned of.
  bool can_be_tiles(const Matrix& host_matrix);
  static void warn(const std::string& what, const std::string& why, bool& warned);
  Status place_all(const std::vector<Matrix*>& matrices);
  Status upload_all(const std::vector<Matrix*>& matrices, Buffer& buffer, bool for_tiles);

  Memory& memory_;
  cudaStream_t stream_;
  Device device_;
  std::string tensor_cores_;
  MoePaths paths_;
  std::string why_no_tiles_;
  bool warned_of_experts_ = false, warned_of_path_ = false, warned_of_matrices_ = false;
  std::vector<Buffer> weights_;
  Buffer staging_;       // a weight on its way to its own order
  Buffer does_not_fit_;  // an int, of make_tiles()
};

}  // namespace nibble::cuda
