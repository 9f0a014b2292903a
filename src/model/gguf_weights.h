// The weights of a GGUF file under the names of the model's Hugging Face checkpoint.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/gguf.h"
#include "checkpoint/weight_source.h"
#include "model/spec.h"

namespace nibble {

class GgufWeights : public WeightSource {
 public:
  // `spec` is that of the file (load_gguf_spec).
  GgufWeights(std::shared_ptr<Gguf> gguf, const ModelSpec& spec);

  bool has(const std::string& name) const override;
  int64_t total_bytes() const override { return gguf_->total_bytes(); }
  std::vector<StoredTensor> stored() const override;  // but for layers that the spec passes over
  std::vector<std::span<const std::byte>> mappings() const override { return gguf_->mappings(); }
  Result<std::vector<float>> floats(const std::string& name, std::span<const int64_t> shape) override;
  Result<Matrix> matrix(const std::string& prefix, int64_t n, int64_t k) override;
  // GGUF has gate and up apart.
  Result<std::vector<Matrix>> stacked(const std::string& name, int64_t experts, int64_t n, int64_t k,
                                      RowSplit split) override;
  Result<std::vector<float>> stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                          RowSplit split) override;
  void ignore(const std::string& name) override;
  std::vector<std::string> unused() const override { return gguf_->unused(); }
  const std::string& file_of(const std::string& name) const override;

 private:
  // Where a module's tensors are: "blk.3.ffn_gate_exps", and of which expert.
  struct Place {
    std::string base;
    std::optional<int64_t> expert;
  };
  // Of a module's name without ".weight"; a name that no table has stands for itself, and is then missing.
  Place place_of(const std::string& module) const;
  // "BASE.weight" or "BASE.bias" of a tensor's name.
  std::string tensor_of(const std::string& name) const;
  // Expert `expert` of [experts, n, k], or all of [n, k].
  Result<Matrix> matrix_at(const Place& place, int64_t experts, int64_t n, int64_t k);
  // A scale of NVFP4 beside its matrix: of [1], or of [experts].
  Result<float> scale_at(const Place& place, const std::string& end, int64_t experts, float otherwise);

  // Of a layer that the spec passes over.
  bool is_ignored(const std::string& tensor) const;

  std::shared_ptr<Gguf> gguf_;
  TensorNames names_;
  std::vector<std::string> ignored_blocks_;  // "blk.92."
  int64_t experts_ = 0;
};

}  // namespace nibble
