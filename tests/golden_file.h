// Reads golden.safetensors files: what an independent float32 implementation computed.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/safetensors.h"

namespace nibble {

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& path) {
    auto file = FileSystem::posix().open(path);
    EXPECT_TRUE(file.ok()) << file.status().message();
    if (!file.ok()) return;
    file_ = std::move(file).value();
    auto header = read_safetensors_header(*file_);
    EXPECT_TRUE(header.ok()) << header.status().message();
    if (!header.ok()) return;
    for (TensorInfo& info : header->tensors) infos_[info.name] = info;
  }

  bool has(const std::string& name) const { return infos_.count(name) != 0; }
  const std::vector<int64_t>& shape(const std::string& name) const { return infos_.at(name).shape; }

  // The whole tensor; T is float for F32 and int32_t for I32.
  template <class T>
  std::vector<T> get(const std::string& name) const {
    const TensorInfo& info = infos_.at(name);
    EXPECT_EQ(info.dtype, (std::is_same_v<T, float> ? DType::kF32 : DType::kI32)) << name;
    std::vector<T> values(static_cast<size_t>(info.bytes) / sizeof(T));
    EXPECT_TRUE(file_->read_at(info.begin, std::as_writable_bytes(std::span(values))).ok());
    return values;
  }

  // Which of `count` tokens the rows of a tensor belong to: all, or those that NAME.rows lists.
  std::vector<int32_t> rows(const std::string& name, size_t count) const {
    if (has(name + ".rows")) return get<int32_t>(name + ".rows");
    std::vector<int32_t> all(count);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

 private:
  std::unique_ptr<File> file_;
  std::map<std::string, TensorInfo> infos_;
};

}  // namespace nibble
