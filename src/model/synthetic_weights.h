// The weights of a synthetic model: made up from their names, the same in every run, in the formats of the
// released checkpoints (routed experts NVFP4, or by name q4 or BF16; the rest BF16), and scaled so that
// activations keep their size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/weight_source.h"
#include "model/spec.h"
#include "ops/memory.h"

namespace nibble {

class SyntheticWeights : public WeightSource {
 public:
  // `name` stands for the model in messages, and tells synthetic_format(). Matrices of a format that is
  // `copied` overlap in a pool, which takes no time and little memory; each of the others has memory of its
  // own, so that what computes on them reads memory and not its caches. They are the same bytes. Such memory
  // that is not free is an error before any is filled.
  static Result<std::unique_ptr<SyntheticWeights>> make(const ModelSpec& spec, const std::string& name,
                                                        const FormatsCopied& copied);

  bool has(const std::string& name) const override;
  int64_t total_bytes() const override;
  bool is_mapped() const override { return false; }
  std::vector<StoredTensor> stored() const override;
  Result<std::vector<float>> floats(const std::string& name, std::span<const int64_t> shape) override;
  Result<Matrix> matrix(const std::string& prefix, int64_t n, int64_t k) override;
  // No model here has its experts stacked.
  Result<std::vector<Matrix>> stacked(const std::string& name, int64_t experts, int64_t n, int64_t k,
                                      RowSplit split) override;
  Result<std::vector<float>> stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                          RowSplit split) override;
  void ignore(const std::string& /*name*/) override {}
  std::vector<std::string> unused() const override;
  const std::string& file_of(const std::string& /*name*/) const override { return name_; }

 private:
  struct Tensor {
    std::vector<int64_t> shape;
    MatrixFormat format = MatrixFormat::kF32;  // of vectors and small tensors F32
    bool own_bytes = false;                    // of a matrix: it has memory of its own
    bool used = false;
  };
  // Bytes of which each tensor has a run: at some place of the first `period` ones, which go on repeating
  // behind them.
  struct Pool {
    std::vector<std::byte> bytes;
    int64_t period = 0;
  };

  SyntheticWeights(const ModelSpec& spec, std::string name);
  Result<Tensor*> find(const std::string& name, std::span<const int64_t> shape);
  // `bytes` bytes for the tensor, from the pool or copied out of it into bytes of its own.
  const void* take(const Pool& pool, const std::string& name, int64_t bytes, bool own);

  std::string name_;
  std::map<std::string, Tensor> tensors_;  // of a matrix without ".weight"
  Pool bf16_, codes_, scales_;
  Buffer own_bytes_;
  int64_t taken_ = 0;  // of them
};

}  // namespace nibble
