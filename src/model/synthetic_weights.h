// The weights of a synthetic model: made up from their names, the same in every run, in the formats of the
// released checkpoints (routed experts NVFP4, the rest BF16), and scaled so that activations keep their size.
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
  // Where the bytes of matrices lie. They are the same bytes.
  enum class Bytes {
    kShared,    // matrices overlap in a pool for each format: no time and little memory, for who copies them
    kDistinct,  // each has memory of its own: what computes on them reads memory and not its caches
  };

  // `name` stands for the model in messages. Distinct bytes that do not fit in free memory are an error
  // before any is made.
  static Result<std::unique_ptr<SyntheticWeights>> make(const ModelSpec& spec, const std::string& name,
                                                        Bytes bytes);

  bool has(const std::string& name) const override;
  int64_t total_bytes() const override;
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
  // `bytes` bytes for the tensor, from the pool or copied out of it.
  const void* take(const Pool& pool, const std::string& name, int64_t bytes);

  std::string name_;
  std::map<std::string, Tensor> tensors_;  // of a matrix without ".weight"
  Pool bf16_, codes_, scales_;
  Buffer distinct_;  // empty: shared
  int64_t taken_ = 0;
};

}  // namespace nibble
