// Writes safetensors for tests, right ones and wrong ones: nothing here checks anything.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nibble {

// Little-endian bytes of values of one type.
template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Length, header, data, put together as they are.
inline std::string safetensors(std::string_view header, std::string_view data = "",
                               std::optional<uint64_t> length = std::nullopt) {
  const uint64_t header_bytes = length.value_or(header.size());
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header_bytes >> (8 * i));
  return file.append(header).append(data);
}

class SafetensorsWriter {
 public:
  SafetensorsWriter& add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
                         const std::string& bytes) {
    tensors_.push_back({name, dtype, shape, bytes});
    return *this;
  }
  // Changes the tensor of this name, which REQUIRES to be there.
  SafetensorsWriter& replace(const std::string& name, const std::string& dtype,
                             const std::vector<int64_t>& shape, const std::string& bytes) {
    return remove(name).add(name, dtype, shape, bytes);
  }
  SafetensorsWriter& remove(const std::string& name) {
    std::erase_if(tensors_, [&](const Tensor& tensor) { return tensor.name == name; });
    return *this;
  }
  // The header ends in this many spaces, which moves the data.
  SafetensorsWriter& pad(size_t spaces) {
    padding_ = spaces;
    return *this;
  }

  std::string header() const {
    std::string text = R"({"__metadata__":{"format":"pt"})";
    size_t offset = 0;
    for (const Tensor& tensor : tensors_) {
      text += fmt::format(R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", tensor.name,
                          tensor.dtype, fmt::join(tensor.shape, ","), offset, offset + tensor.bytes.size());
      offset += tensor.bytes.size();
    }
    return text + "}" + std::string(padding_, ' ');
  }
  std::string data() const {
    std::string all;
    for (const Tensor& tensor : tensors_) all += tensor.bytes;
    return all;
  }
  std::string file() const { return safetensors(header(), data()); }

 private:
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  std::vector<Tensor> tensors_;
  size_t padding_ = 0;
};

}  // namespace nibble
