// Any bytes as model.safetensors and as its index: no crash, no hang, no large allocation, and only errors of
// one line; where the file is good, every tensor of it in every way that the model loader asks.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/check.h"
#include "base/faulty_file.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/shard_index.h"

namespace nibble {
namespace {

void expect_sane(const Status& status) {
  NIBBLE_CHECK(status.ok() || status.code() == ErrorCode::kUser);
  NIBBLE_CHECK(status.message().find('\n') == std::string::npos);
}

// Reads all bytes, so that the sanitizer sees a view that is too long.
void touch(const Matrix& matrix) {
  std::vector<float> row(static_cast<size_t>(matrix.k));
  for (int64_t n = 0; n < matrix.n; ++n) dequantize_row(matrix, n, row.data());
}

void load(const FileSystem& files) {
  Result<Checkpoint> checkpoint = Checkpoint::open(files, "m");
  expect_sane(checkpoint.status());
  if (!checkpoint.ok()) return;
  int64_t data_bytes = 0;
  for (const TensorInfo* tensor : checkpoint->tensors()) {
    data_bytes += tensor->bytes;
    Result<TensorView> view = checkpoint->tensor(tensor->name, tensor->shape);
    NIBBLE_CHECK(view.ok() && std::ssize(view->bytes) == tensor->bytes);
    NIBBLE_CHECK(reinterpret_cast<uintptr_t>(view->bytes.data()) %
                     static_cast<uintptr_t>(dtype_bytes(tensor->dtype)) ==
                 0);
    expect_sane(checkpoint->floats(tensor->name, tensor->shape).status());
    if (tensor->shape.size() != 2) continue;
    const std::string prefix = tensor->name.substr(0, tensor->name.rfind('.'));
    for (int64_t columns_per_byte : {1, 2}) {
      const int64_t n = tensor->shape[0], k = tensor->shape[1];
      if (k > INT64_MAX / columns_per_byte) continue;
      Result<Matrix> matrix = checkpoint->matrix(prefix, n, k * columns_per_byte);
      expect_sane(matrix.status());
      // [2^60, 0] is a good shape of no bytes.
      if (matrix.ok() && tensor->bytes > 0) touch(*matrix);
    }
  }
  NIBBLE_CHECK(data_bytes == checkpoint->total_bytes());
}

}  // namespace
}  // namespace nibble

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  FaultyFileSystem files;
  files.add_file("m/model.safetensors", bytes);
  load(files);
  files.refuse_map("m/model.safetensors");
  load(files);
  expect_sane(read_shard_index(files, "m/model.safetensors").status());
  return 0;
}
