// The models that the checkpoint tests load, and break.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/faulty_file.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/write_safetensors.h"
#include "quant/float_codes.h"
#include "quant/nvfp4.h"

namespace nibble {

using Shape = std::vector<int64_t>;
inline constexpr const char* kFile = "m/model.safetensors";
inline constexpr const char* kIndex = "m/model.safetensors.index.json";

inline std::string f32(float value) { return bytes_of(std::vector<float>{value}); }

inline constexpr int64_t kRows = 3, kColumns = 32;
inline std::string codes() {
  std::string bytes;
  for (int i = 0; i < kRows * kColumns / 2; ++i) bytes += static_cast<char>(i * 37 + 11);
  return bytes;
}
inline std::string block_scales() {
  std::string bytes;
  for (int i = 0; i < kRows * kColumns / nvfp4::kGroup; ++i) bytes += static_cast<char>(0x30 + 3 * i);
  return bytes;
}

// Every kind of tensor that the tests below break: `plain` BF16, `mo` ModelOpt, `ct` compressed-tensors.
inline SafetensorsWriter good_model() {
  SafetensorsWriter writer;
  std::vector<uint16_t> bf16;
  for (int i = 0; i < 6; ++i) bf16.push_back(float_to_bf16(static_cast<float>(i) - 2.5f));
  writer.add("mo.weight", "U8", {kRows, kColumns / 2}, codes())
      .add("mo.weight_scale", "F8_E4M3", {kRows, kColumns / 16}, block_scales())
      .add("mo.weight_scale_2", "F32", {}, f32(0.25f))
      .add("mo.input_scale", "F32", {}, f32(0.5f))
      .add("ct.weight_packed", "U8", {kRows, kColumns / 2}, codes())
      .add("ct.weight_scale", "F8_E4M3", {kRows, kColumns / 16}, block_scales())
      .add("ct.weight_global_scale", "F32", {1}, f32(4.0f))
      .add("ct.input_global_scale", "F32", {1}, f32(0.0f))
      .add("plain.weight", "BF16", {2, 3}, bytes_of(bf16))
      .add("norm.weight", "F32", {4}, bytes_of(std::vector<float>{1, 2, 3, 4}));
  return writer;
}

inline Result<Checkpoint> open_one(const SafetensorsWriter& writer) {
  FaultyFileSystem files;
  files.add_file(kFile, writer.file());
  return Checkpoint::open(files, "m");
}

// A test cannot go on without it, so a failure aborts by value()'s own check.
inline Checkpoint opened(const SafetensorsWriter& writer) {
  Result<Checkpoint> checkpoint = open_one(writer);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  return std::move(checkpoint).value();
}

// Two shards and their index; `change` breaks what it likes.
struct Shards {
  std::string index = R"({"metadata":{"total_size":8,"deep":[[{"weight_map":1}]],"n":-1.5},)"
                      R"("weight_map":{"a":"s1.safetensors","b":"s2.safetensors"},"more":null})";
  SafetensorsWriter first = SafetensorsWriter().add("a", "F32", {1}, f32(1));
  SafetensorsWriter second = SafetensorsWriter().add("b", "F32", {1}, f32(2));

  FaultyFileSystem files() const {
    FaultyFileSystem all;
    all.add_file(kIndex, index);
    all.add_file("m/s1.safetensors", first.file());
    all.add_file("m/s2.safetensors", second.file());
    return all;
  }
};

}  // namespace nibble
