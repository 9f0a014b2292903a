#include "checkpoint/safetensors_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "base/check.h"
#include "base/numbers.h"

namespace nibble {

SafetensorsLayout safetensors_layout(std::vector<TensorInfo> tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return dtype_bytes(tensors[a].dtype) > dtype_bytes(tensors[b].dtype);
  });

  // "pt": transformers refuses a file that does not say which framework its layout is of.
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  int64_t offset = 0;
  for (size_t index : order) {
    TensorInfo& tensor = tensors[index];
    const std::optional<int64_t> elements = checked_product(tensor.shape);
    NIBBLE_CHECK(elements.has_value());
    tensor.begin = offset;
    tensor.bytes = *elements * dtype_bytes(tensor.dtype);
    offset += tensor.bytes;
    header[tensor.name] = {{"dtype", dtype_name(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {tensor.begin, offset}}};
  }
  SafetensorsLayout layout;
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize(static_cast<size_t>(round_up(std::ssize(text), 8)), ' ');
  for (int byte = 0; byte < 8; ++byte)
    layout.head += static_cast<char>((static_cast<uint64_t>(text.size()) >> (8 * byte)) & 0xFF);
  layout.head += text;
  for (TensorInfo& tensor : tensors) tensor.begin += std::ssize(layout.head);
  layout.file_bytes = std::ssize(layout.head) + offset;
  layout.tensors = std::move(tensors);
  return layout;
}

Result<SafetensorsOutput> SafetensorsOutput::create(const std::string& path, SafetensorsLayout layout) {
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<OutputFile> file, OutputFile::create(path));
  NIBBLE_RETURN_IF_ERROR(file->write_at(0, std::as_bytes(std::span(layout.head))));
  return SafetensorsOutput(std::move(file), std::move(layout));
}

Status SafetensorsOutput::write(size_t index, int64_t offset, std::span<const std::byte> bytes) {
  const TensorInfo& tensor = layout_.tensors[index];
  NIBBLE_CHECK(offset >= 0 && offset + std::ssize(bytes) <= tensor.bytes);
  return file_->write_at(tensor.begin + offset, bytes);
}

}  // namespace nibble
