// Matrices of a GGUF file as tensors of a checkpoint, some megabytes of rows at a time: the work of the units
// of a CheckpointJob. Each writes its outputs by index and reports the bytes of the file that it has read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "checkpoint/checkpoint_job.h"
#include "quant/matrix.h"

namespace nibble {

using ReadBytes = std::function<void(int64_t)>;

// The row of the file that is row `row` of the checkpoint. head_dim > 0: rows of heads whose neighbours turn
// together, to halves; 0: where it is.
int64_t gguf_file_row(int64_t row, int64_t head_dim);

// F32, F16, BF16: output 0 has rows as they are.
Status write_rows(const Matrix& matrix, int64_t head_dim, const WriteTensor& write, const ReadBytes& read);
// Of any format, as BF16.
Status write_bf16_rows(const Matrix& matrix, int64_t head_dim, const WriteTensor& write,
                       const ReadBytes& read);

// NVFP4 in the layout of nvfp4.h: codes, block scales, tensor scale, and the input scale where there is one.
// From GGUF's NVFP4 with its bits; a block scale without a code there is an error that names file and tensor.
Status write_nvfp4(const Matrix& matrix, int64_t head_dim, const std::string& file, const std::string& tensor,
                   const WriteTensor& write, const ReadBytes& read);
// From any format, quantized anew.
Status quantize_to_nvfp4(const Matrix& matrix, int64_t head_dim, const WriteTensor& write,
                         const ReadBytes& read);
// GGUF's MXFP4 with its bits: codes and block scales.
Status write_mxfp4(const Matrix& matrix, int64_t head_dim, const WriteTensor& write, const ReadBytes& read);

// An expert of gpt-oss's stacked tensors: gate and up, whose rows take turns, or down alone.
// With its bits; REQUIRES all parts in MXFP4.
Status write_mxfp4_expert(const std::vector<Matrix>& parts, int64_t expert, const WriteTensor& write,
                          const ReadBytes& read);
// Of any formats, as BF16, transposed.
Status write_transposed_expert(const std::vector<Matrix>& parts, int64_t expert, const WriteTensor& write,
                               const ReadBytes& read);

}  // namespace nibble
