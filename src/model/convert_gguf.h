// A GGUF file to a model directory as Hugging Face lays it out.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "checkpoint/convert.h"
#include "checkpoint/gguf.h"

namespace nibble {

// Everything that the model's loader takes, under the names of its checkpoint: NVFP4 in ModelOpt's layout and
// MXFP4 in gpt-oss's (else compressed-tensors') with their bits, F32, F16 and BF16 as they are, other blocks
// as BF16 or, with options.requantize, linear layers as NVFP4. Rows of "llama" go back to the order of
// halves. `write_text_files` adds what is no weight and no config.json to a directory.
Result<ConvertSummary> convert_gguf(const std::shared_ptr<Gguf>& gguf, const ConvertOptions& options,
                                    const std::function<Status(const std::string&)>& write_text_files);

}  // namespace nibble
