// The tensors of a model directory: model.safetensors, or shards named by model.safetensors.index.json. Where
// both are there, model.safetensors is read and the index is not (as transformers does).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/weight_source.h"
#include "quant/matrix.h"

namespace nibble {

// A tensor's bytes in memory: mapped, or read into a buffer of the Checkpoint's where the file cannot be
// mapped or where the mapped address is not aligned for the dtype (safetensors promise no alignment). Always
// aligned to dtype_bytes(info->dtype), and to nothing more.
struct TensorView {
  const TensorInfo* info = nullptr;
  std::span<const std::byte> bytes;
};

// Owns the files and what was read of them; views are valid as long as it lives. Not safe for concurrent use
// while loading.
class Checkpoint : public WeightSource {
 public:
  // Opens all files of `directory` and checks their headers against each other and the index: a shard that is
  // missing, a tensor that the index places elsewhere, a tensor in two shards.
  static Result<Checkpoint> open(const FileSystem& files, const std::string& directory);

  bool has(const std::string& name) const override { return tensors_.count(name) != 0; }
  const TensorInfo* info(const std::string& name) const;  // null where there is none
  std::vector<const TensorInfo*> tensors() const;         // by name
  int64_t total_bytes() const override;
  std::vector<StoredTensor> stored() const override;
  std::vector<std::span<const std::byte>> mappings() const override { return mappings_of(files_); }
  // Stacked experts are not used as they lie, but for those whose rows are.
  bool is_mapped() const override { return own_bytes() == 0; }
  int64_t own_bytes() const override;
  const std::string& directory() const { return directory_; }

  // The tensor with exactly this shape and one of these dtypes (none: any); marks it as used. A missing
  // tensor, another dtype, or another shape is an error that names the file, the tensor, what was wanted and
  // what is there. A second call returns the same bytes.
  Result<TensorView> tensor(const std::string& name, std::span<const int64_t> shape,
                            std::initializer_list<DType> dtypes = {});
  // Reads bytes of a tensor of this Checkpoint, from `offset` inside it, into the caller's memory, and keeps
  // none of them. Safe for concurrent calls. REQUIRES the bytes to lie inside the tensor.
  Status read_at(const TensorInfo& tensor, int64_t offset, std::span<std::byte> out) const;
  // A vector or scalar stored as F32, BF16 or F16, as float32. NaN or infinity in it is an error.
  Result<std::vector<float>> floats(const std::string& name, std::span<const int64_t> shape) override;

  // The matrix [n, k] under `prefix` (no dot at its end), in the format that its scale tensors say
  // (spec formats.md 2: decided per tensor, not by the config):
  //   PREFIX.weight F32, F16 or BF16 [n, k]
  //   PREFIX.weight U8 [n, k/2] + weight_scale F8_E4M3 [n, k/16] + weight_scale_2 F32 scalar       ModelOpt
  //   PREFIX.weight_packed U8 [n, k/2] + weight_scale F8_E4M3 + weight_global_scale F32 [1], reciprocal
  //   PREFIX.weight_packed U8 [n, k/2] + weight_scale U8 (e8m0) [n, k/32]                             MXFP4
  //   PREFIX.weight_q4 U32 [n, k/32, 4] + weight_scale F16 [n, k/32]                                     q4
  //   PREFIX.weight F8_E4M3 [n, k] + weight_scale F32 scalar                                            FP8
  //   PREFIX.weight F8_E4M3 [n, k] + weight_scale_inv F32 [ceil(n/128), ceil(k/128)], multiplied  FP8 blocks
  // Marks those and input_scale / input_global_scale as used; of the latter only NVFP4's are kept (a broken
  // one is an error where it is needed). NaN and infinity among scales or FP8 codes, a tensor scale that is
  // negative, a weight_global_scale that is not above 0, and k that is no multiple of the format's group are
  // errors; so are other 4-bit and 8-bit formats, by name. F32, F16 and BF16 matrices are not searched for
  // NaN.
  Result<Matrix> matrix(const std::string& prefix, int64_t n, int64_t k) override;

  // The experts' matrices [n, k] of a stacked parameter (gpt-oss):
  //   NAME_blocks U8 [experts, n', k/32, 16] + NAME_scales U8 (e8m0) [experts, n', k/32]    MXFP4
  //   NAME BF16, F16 or F32 [experts, k, n']                                                transposed
  // kAll: n' = n; kEven and kOdd: n' = 2n, of which every second row (column, where transposed) is taken.
  // What is split or transposed is copied into memory of the Checkpoint's; the rest are views.
  Result<std::vector<Matrix>> stacked(const std::string& name, int64_t experts, int64_t n, int64_t k,
                                      RowSplit split) override;
  // Their biases NAME_bias [experts, n'] with the same split, as float32: [experts, n].
  Result<std::vector<float>> stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                          RowSplit split) override;

  void release(const FormatsCopied& copied) override;
  void ignore(const std::string& name) override;
  // By name: unknown tensors are an error in the model loader.
  std::vector<std::string> unused() const override;
  // The directory where no file holds it.
  const std::string& file_of(const std::string& name) const override;

 private:
  struct Entry {
    TensorInfo info;
    size_t file = 0;  // index into files_
    bool used = false;
    std::unique_ptr<std::byte[]> copy;  // where the mapping will not do
  };

  // open() by steps.
  Status add_file(const FileSystem& files, const std::string& name);
  Status add_shards(const FileSystem& files, const std::string& index_path);

  std::optional<MatrixFormat> format_of(const TensorInfo& tensor) const;
  Result<std::span<const std::byte>> bytes_of(Entry& entry);
  // Of a matrix's rows, as the file says it: whoever needs it judges it. 0 where there is none.
  float input_scale(const std::string& name);
  // F32 [] or [1], finite.
  Result<float> tensor_scale(const std::string& name);
  // The tensors of one format each, for matrix() and stacked().
  Result<Matrix> nvfp4_matrix(const std::string& codes, const std::string& prefix, int64_t n, int64_t k);
  Result<Matrix> fp8_matrix(const std::string& prefix, int64_t n, int64_t k);
  // 4-bit codes of groups of 32 and their scales, under names and shapes that differ by writer.
  Result<Matrix> group32_matrix(MatrixFormat format, const std::string& codes, DType codes_dtype,
                                std::span<const int64_t> codes_shape, const std::string& scales,
                                DType scales_dtype, int64_t n, int64_t k);
  // "needs it": the scale tensor of a matrix that is there.
  Status require(const std::string& scales, const std::string& codes) const;
  Status check_group(MatrixFormat format, const std::string& name, int64_t k) const;
  Status check_scales(const std::string& name, const TensorView& scales, int64_t columns) const;
  // By steps of stacked(). Every second row of a tensor whose rows have row_bytes (kAll: all, no copy).
  Result<const std::byte*> split_rows(const TensorView& view, int64_t rows, int64_t row_bytes,
                                      RowSplit split);
  Result<std::vector<Matrix>> transposed(const TensorView& view, int64_t experts, int64_t n, int64_t k,
                                         RowSplit split);
  // Memory for parts of matrices of `format`, which lives until release().
  Result<std::byte*> own(int64_t bytes, const std::string& name, MatrixFormat format);

  // "FILE: tensor 'NAME': ..."
  Status tensor_error(const std::string& name, const std::string& what) const;
  Status mismatch(const TensorInfo& info, const std::string& wanted) const;
  // Names the nearest tensor that is there.
  Status missing(const std::string& name, const std::string& why) const;

  std::string directory_;
  std::vector<std::unique_ptr<File>> files_;
  std::map<std::string, Entry> tensors_;
  struct Owned {
    MatrixFormat format;
    std::unique_ptr<std::byte[]> memory;
  };
  std::vector<Owned> owned_;
};

}  // namespace nibble
