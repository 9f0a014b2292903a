// Writes GGUF for tests, right ones and wrong ones: nothing here checks anything.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "checkpoint/gguf_metadata.h"

namespace nibble {

// The little-endian bytes of a number.
template <class T>
std::string number_bytes(T value) {
  static_assert(std::is_arithmetic_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// A string as GGUF stores it, with a length that may be another than its own.
inline std::string string_bytes(std::string_view text, std::optional<uint64_t> length = {}) {
  return number_bytes<uint64_t>(length.value_or(text.size())).append(text);
}

inline std::string strings_bytes(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += string_bytes(text);
  return all;
}

class GgufWriter {
 public:
  GgufWriter& version(uint32_t version) {
    version_ = version;
    return *this;
  }
  GgufWriter& magic(std::string_view magic) {
    magic_ = magic;
    return *this;
  }
  // What the header claims, whatever is there.
  GgufWriter& claim_tensors(uint64_t count) {
    claimed_tensors_ = count;
    return *this;
  }
  GgufWriter& claim_entries(uint64_t count) {
    claimed_entries_ = count;
    return *this;
  }
  // Of the data; general.alignment is an entry like any other.
  GgufWriter& align(size_t alignment) {
    alignment_ = alignment;
    return *this;
  }

  // An entry of any bytes after its key; `type` may be no type.
  GgufWriter& raw(std::string_view key, uint32_t type, std::string_view bytes) {
    return raw_key(string_bytes(key), type, bytes);
  }
  GgufWriter& raw_key(std::string_view key_bytes, uint32_t type, std::string_view bytes) {
    metadata_.append(key_bytes).append(number_bytes(type)).append(bytes);
    ++entries_;
    return *this;
  }
  GgufWriter& value(std::string_view key, GgufValueType type, std::string_view bytes) {
    return raw(key, static_cast<uint32_t>(type), bytes);
  }
  GgufWriter& u32(std::string_view key, uint32_t number) {
    return value(key, GgufValueType::kU32, number_bytes(number));
  }
  GgufWriter& f32(std::string_view key, float number) {
    return value(key, GgufValueType::kF32, number_bytes(number));
  }
  GgufWriter& text(std::string_view key, std::string_view text) {
    return value(key, GgufValueType::kString, string_bytes(text));
  }
  GgufWriter& boolean(std::string_view key, bool is_true) {
    return value(key, GgufValueType::kBool, std::string(1, is_true ? '\1' : '\0'));
  }
  GgufWriter& array(std::string_view key, GgufValueType type, uint64_t count, std::string_view bytes) {
    return value(key, GgufValueType::kArray,
                 number_bytes(static_cast<uint32_t>(type)).append(number_bytes(count)).append(bytes));
  }
  GgufWriter& texts(std::string_view key, const std::vector<std::string>& texts) {
    return array(key, GgufValueType::kString, texts.size(), strings_bytes(texts));
  }
  // The three keys of a part.
  GgufWriter& split(uint16_t number, uint16_t count, int32_t tensors) {
    value("split.no", GgufValueType::kU16, number_bytes(number));
    value("split.count", GgufValueType::kU16, number_bytes(count));
    return value("split.tensors.count", GgufValueType::kI32, number_bytes(tensors));
  }

  // A tensor after the last one; `dims` in the file's order, the fastest first.
  GgufWriter& tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                     std::string_view bytes) {
    while (data_.size() % alignment_ != 0) data_ += '\0';
    const size_t offset = data_.size();
    data_ += bytes;
    return tensor_at(name, dims, type, offset);
  }
  // Only its entry in the header.
  GgufWriter& tensor_at(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                        uint64_t offset) {
    std::string dim_bytes;
    for (uint64_t dim : dims) dim_bytes += number_bytes(dim);
    return raw_tensor(string_bytes(name)
                          .append(number_bytes(static_cast<uint32_t>(dims.size())))
                          .append(dim_bytes)
                          .append(number_bytes(type))
                          .append(number_bytes(offset)));
  }
  GgufWriter& raw_tensor(std::string_view bytes) {
    infos_ += bytes;
    ++tensors_;
    return *this;
  }
  GgufWriter& data(std::string_view bytes) {
    data_ += bytes;
    return *this;
  }

  // Everything before the data, without padding.
  std::string header() const {
    return magic_ + number_bytes(version_) + number_bytes(claimed_tensors_.value_or(tensors_)) +
           number_bytes(claimed_entries_.value_or(entries_)) + metadata_ + infos_;
  }
  std::string file() const {
    std::string all = header();
    if (data_.empty()) return all;
    while (all.size() % alignment_ != 0) all += '\0';
    return all + data_;
  }

 private:
  std::string magic_ = "GGUF";
  uint32_t version_ = 3;
  size_t alignment_ = 32;
  uint64_t tensors_ = 0, entries_ = 0;
  std::optional<uint64_t> claimed_tensors_, claimed_entries_;
  std::string metadata_, infos_, data_;
};

}  // namespace nibble
