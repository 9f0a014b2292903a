// What the weight loader asks of a model's files, whatever container they are. Names are those of the model's
// Hugging Face checkpoint; where the container has others (GGUF), it translates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "quant/matrix.h"

namespace nibble {

// Which half of gpt-oss's stacked gate_up: gate (in the even rows of its safetensors) or up (in the odd
// ones); kAll of what is not two matrices in one.
enum class RowSplit { kAll, kEven, kOdd };

// A tensor as the file has it, for people.
struct StoredTensor {
  std::string name;
  std::string_view dtype;
  std::string_view format;  // of the matrix that it is a part of: codes and scales of NVFP4 are both "NVFP4"
  std::optional<MatrixFormat> matrix;  // the same; none: of a type that is no matrix's here
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// Of which formats nobody computes on the bytes of the source.
using FormatsCopied = std::function<bool(MatrixFormat)>;

// Matrices point into the source, which must outlive them. Not safe for concurrent use.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual bool has(const std::string& name) const = 0;
  virtual int64_t total_bytes() const = 0;
  // Whether matrices lie in mapped files, whose pages the kernel drops and reads again as it needs memory.
  virtual bool is_mapped() const { return true; }
  // Of matrices that are brought into memory in another order: at most, and until release().
  virtual int64_t own_bytes() const { return 0; }
  virtual std::vector<StoredTensor> stored() const = 0;  // by name
  // The files that are mapped, in their order.
  virtual std::vector<std::span<const std::byte>> mappings() const { return {}; }

  // A missing tensor, another type, another shape, and scales that are no numbers are errors that name the
  // file, the tensor, what was wanted and what is there. What was asked for counts as used.
  //
  // A vector or small tensor as float32. NaN or infinity in it is an error.
  virtual Result<std::vector<float>> floats(const std::string& name, std::span<const int64_t> shape) = 0;
  // The matrix [n, k] under `prefix` (no dot at its end), in the format that it is stored in.
  virtual Result<Matrix> matrix(const std::string& prefix, int64_t n, int64_t k) = 0;
  // The experts' matrices [n, k] of a parameter that the checkpoint has stacked (gpt-oss), and their biases
  // [experts, n].
  virtual Result<std::vector<Matrix>> stacked(const std::string& name, int64_t experts, int64_t n, int64_t k,
                                              RowSplit split) = 0;
  virtual Result<std::vector<float>> stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                                  RowSplit split) = 0;

  // Everything is placed: gives back memory of its own that holds matrices of the formats that were copied.
  virtual void release(const FormatsCopied& /*copied*/) {}
  // Marks a tensor as known but not needed (kv scales, rotary caches).
  virtual void ignore(const std::string& name) = 0;
  // What nobody asked for, as the file calls it.
  virtual std::vector<std::string> unused() const = 0;
  // The file that holds a tensor, for messages.
  virtual const std::string& file_of(const std::string& name) const = 0;
};

}  // namespace nibble
