#include <algorithm>

#include "ops/cuda/gguf_split.h"

namespace nibble::cuda {
namespace {

__global__ void split(GgufBlocks from, uint8_t* to) {
  for (int64_t id = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; id < from.bytes;
       id += static_cast<int64_t>(gridDim.x) * blockDim.x)
    to[id] = from.split_byte(id);
}

}  // namespace

GgufBlocks::GgufBlocks(const Matrix& m)
    : blocks(static_cast<const uint8_t*>(m.codes)),
      format(split_format(m.format)),
      code_bytes(matrix_code_bytes(format, m.n, m.k)),
      bytes(matrix_bytes(format, m.n, m.k)) {
  const MatrixFormatInfo& info = matrix_format_info(format);
  scales = matrix_format_info(m.format).group / info.scale_columns;
  scale_bytes = info.scale_bytes;
  half = info.scale_columns / 2;
}

cudaError_t split_gguf(Matrix& matrix, uint8_t* to, cudaStream_t stream) {
  const GgufBlocks from(matrix);
  split<<<static_cast<unsigned>(std::min<int64_t>((from.bytes + 255) / 256, 65535)), 256, 0, stream>>>(from,
                                                                                                       to);
  matrix.format = from.format;
  matrix.codes = to;
  matrix.scales = to + from.code_bytes;
  return cudaGetLastError();
}

}  // namespace nibble::cuda
