// What broken models get: an error of one line that names the file, the tensor, what was wanted and what is
// there.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "checkpoint/test_models.h"

namespace nibble {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void expect_bad(const Status& status, const std::vector<std::string>& fragments) {
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.code(), ErrorCode::kUser);
  const std::string& message = status.message();
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_TRUE(message.starts_with("m")) << message;
  for (const std::string& fragment : fragments)
    EXPECT_NE(message.find(fragment), std::string::npos) << message << "\nlacks " << fragment;
}

TEST(CheckpointErrors, BadShards) {
  struct Case {
    const char* what;
    std::function<void(Shards&)> change;
    std::vector<std::string> fragments;
  };
  auto index = [](std::string text) { return [text](Shards& shards) { shards.index = text; }; };
  const std::vector<Case> cases = {
      {"not JSON", index("{weight_map"), {kIndex, "not valid JSON", "byte 2"}},
      {"empty", index(""), {kIndex, "not valid JSON"}},
      {"array", index("[]"), {kIndex, "wanted an object", "an array"}},
      {"number", index("3"), {kIndex, "wanted an object", "a number"}},
      {"deep", index(std::string(1'000'000, '[')), {kIndex, "an array"}},
      {"deep inside", index(R"({"x":)" + std::string(1'000'000, '[')), {kIndex, "not valid JSON"}},
      {"no weight_map", index(R"({"metadata":{}})"), {kIndex, "'weight_map' is missing"}},
      {"weight_map is an array", index(R"({"weight_map":["a"]})"), {kIndex, "'weight_map'", "an array"}},
      {"weight_map is a string", index(R"({"weight_map":"a"})"), {kIndex, "'weight_map'", "a string"}},
      {"weight_map twice", index(R"({"weight_map":{},"weight_map":{}})"), {kIndex, "'weight_map'", "twice"}},
      {"weight_map is empty", index(R"({"weight_map":{}})"), {kIndex, "names no tensor"}},
      {"shard is a number", index(R"({"weight_map":{"a":1}})"), {kIndex, "tensor 'a'", "a number"}},
      {"shard is an object", index(R"({"weight_map":{"a":{}}})"), {kIndex, "tensor 'a'", "an object"}},
      {"shard is an array", index(R"({"weight_map":{"a":["s"]}})"), {kIndex, "tensor 'a'", "an array"}},
      {"tensor twice",
       index(R"({"weight_map":{"a":"s1.safetensors","a":"s2.safetensors"}})"),
       {kIndex, "tensor 'a'", "twice"}},
      {"parent",
       index(R"({"weight_map":{"a":"../s1.safetensors"}})"),
       {kIndex, "'../s1.safetensors'", "plain name"}},
      {"two dots", index(R"({"weight_map":{"a":".."}})"), {kIndex, "'..'", "plain name"}},
      {"absolute", index(R"({"weight_map":{"a":"/etc/passwd"}})"), {kIndex, "'/etc/passwd'", "plain name"}},
      {"subfolder", index(R"({"weight_map":{"a":"x/s1.safetensors"}})"), {kIndex, "plain name"}},
      {"backslash", index(R"({"weight_map":{"a":"x\\s1.safetensors"}})"), {kIndex, "plain name"}},
      {"empty name", index(R"({"weight_map":{"a":""}})"), {kIndex, "''", "plain name"}},
      {"control character", index(R"({"weight_map":{"a":"s\n1"}})"), {kIndex, R"('s\x0a1')", "plain name"}},
      {"missing shard",
       index(R"({"weight_map":{"a":"s1.safetensors","b":"s3.safetensors"}})"),
       {kIndex, "1 of 2 shards missing", "'s3.safetensors'"}},
      {"tensor that its shard lacks",
       index(R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors","c":"s2.safetensors"}})"),
       {"m/s2.safetensors", "tensor 'c'", "not there"}},
      {"tensor in the other shard",
       index(R"({"weight_map":{"a":"s2.safetensors","b":"s1.safetensors"}})"),
       {"tensor 'a'", "m/s2.safetensors: ", "in m/s1.safetensors"}},
      {"tensor that the index lacks",
       [](Shards& shards) { shards.second.add("c", "U8", {1}, "x"); },
       {"m/s2.safetensors", "tensor 'c'", "not in the index"}},
      {"tensor in two shards",
       [](Shards& shards) { shards.second.add("a", "U8", {1}, "x"); },
       {"m/s2.safetensors", "tensor 'a'", "also in m/s1.safetensors"}},
      {"broken shard",
       [](Shards& shards) { shards.second.add("c", "U8", {2}, "x"); },
       {"m/s2.safetensors", "tensor 'c'", "has 2 bytes"}},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.what);
    Shards shards;
    bad.change(shards);
    expect_bad(Checkpoint::open(shards.files(), "m").status(), bad.fragments);
  }
}

TEST(CheckpointErrors, BadDirectories) {
  FaultyFileSystem files;
  expect_bad(Checkpoint::open(files, "m").status(), {"m: no such directory"});
  files.add_file("m", "");
  expect_bad(Checkpoint::open(files, "m").status(), {"m: not a directory", "model.safetensors"});
  files.hide("m");
  files.add_file("m2/readme.md", "");
  expect_bad(Checkpoint::open(files, "m2").status(),
             {"m2: wanted model.safetensors, or model.safetensors.index.json", "found no weights"});
  files.add_file("m2/pytorch_model.bin", "");
  expect_bad(Checkpoint::open(files, "m2").status(), {"found only 'pytorch_model.bin'"});
  files.add_file("m3/model.safetensors", "{}");
  files.refuse_open("m3/model.safetensors");
  expect_bad(Checkpoint::open(files, "m3").status(),
             {"m3/model.safetensors: cannot open: Permission denied"});
  files.add_file("m4/model.safetensors/x", "");
  expect_bad(Checkpoint::open(files, "m4").status(), {"m4/model.safetensors: not a regular file"});
}

TEST(CheckpointErrors, ReadErrorInTheMiddleOfATensor) {
  FaultyFileSystem files;
  const std::string file = good_model().file();
  files.add_file(kFile, file);
  files.fail_read_at(kFile, std::ssize(file) - 5);
  Result<Checkpoint> checkpoint = Checkpoint::open(files, "m");
  ASSERT_TRUE(checkpoint.ok());
  EXPECT_TRUE(checkpoint->matrix("mo", kRows, kColumns).ok());
  expect_bad(checkpoint->floats("norm.weight", Shape{4}).status(),
             {kFile, "tensor 'norm.weight'", "cannot be read", "Input/output error"});
}

TEST(CheckpointErrors, FileThatShrank) {
  FaultyFileSystem files;
  const std::string file = good_model().file();
  files.add_file(kFile, file);
  files.shrink(kFile, std::ssize(file) - 5);
  Result<Checkpoint> checkpoint = Checkpoint::open(files, "m");
  ASSERT_TRUE(checkpoint.ok());
  expect_bad(checkpoint->floats("norm.weight", Shape{4}).status(),
             {kFile, "tensor 'norm.weight'", "wanted 16 bytes", "ends after 11 of them"});
}

using Change = std::function<void(SafetensorsWriter&)>;
// Replaces a tensor of the good model by one of `count` equal bytes.
Change with(const char* name, const char* dtype, Shape shape, size_t count, char byte = 0x11) {
  return [=](SafetensorsWriter& writer) { writer.replace(name, dtype, shape, std::string(count, byte)); };
}
Change with_f32(const char* name, float value) {
  return [=](SafetensorsWriter& writer) { writer.replace(name, "F32", {1}, f32(value)); };
}
Change without(const char* name) {
  return [=](SafetensorsWriter& writer) { writer.remove(name); };
}
Change bad_scale(const char* name, size_t at, char byte) {
  return [=](SafetensorsWriter& writer) {
    std::string bytes = block_scales();
    bytes[at] = byte;
    writer.replace(name, "F8_E4M3", {kRows, kColumns / 16}, bytes);
  };
}

TEST(CheckpointErrors, BadMatrices) {
  struct Case {
    const char* what;
    Change change;
    const char* prefix;
    int64_t n, k;
    std::vector<std::string> fragments;
  };
  const Change nothing = [](SafetensorsWriter&) {};
  const std::vector<Case> cases = {
      {"plain: rows",
       nothing,
       "plain",
       4,
       3,
       {"tensor 'plain.weight': wanted BF16, F16 or F32 [4, 3], found BF16 [2, 3]"}},
      {"plain: transposed", nothing, "plain", 3, 2, {"wanted BF16, F16 or F32 [3, 2], found BF16 [2, 3]"}},
      {"plain: I32",
       with("plain.weight", "I32", {2, 3}, 24),
       "plain",
       2,
       3,
       {"tensor 'plain.weight': wanted BF16, F16 or F32 [2, 3], found I32 [2, 3]"}},
      {"plain: one dim", with("plain.weight", "BF16", {6}, 12), "plain", 2, 3, {"found BF16 [6]"}},
      {"plain: negative", nothing, "plain", -2, -3, {"wanted BF16, F16 or F32 [-2, -3]"}},
      {"missing",
       nothing,
       "plane",
       2,
       3,
       {"m: tensor 'plane.weight': is missing", "nearest", "'plain.weight'"}},
      {"missing, nothing near", nothing, "xyz", 2, 3, {"m: tensor 'xyz.weight': is missing"}},
      {"FP8 E5M2",
       with("plain.weight", "F8_E5M2", {2, 3}, 6),
       "plain",
       2,
       3,
       {"'plain.weight'", "not implemented yet: FP8 in E5M2"}},
      {"MLX",
       [](SafetensorsWriter& writer) {
         writer.replace("plain.weight", "U32", {2, 3}, std::string(24, 'x'))
             .add("plain.scales", "F16", {1}, "ab");
       },
       "plain",
       2,
       3,
       {"not implemented yet: MLX"}},
      {"MXFP4 of gpt-oss",
       [](SafetensorsWriter& writer) { writer.add("g_blocks", "U8", {1}, "x"); },
       "g",
       2,
       3,
       {kFile, "tensor 'g_blocks'", "not implemented yet: MXFP4"}},
      {"GPTQ",
       [](SafetensorsWriter& writer) { writer.add("g.qweight", "I32", {1}, "abcd"); },
       "g",
       2,
       3,
       {kFile, "tensor 'g.qweight'", "not implemented yet: GPTQ"}},
      {"MXFP4",
       with("mo.weight_scale", "U8", {3, 1}, 3),
       "mo",
       kRows,
       kColumns,
       {kFile, "'mo.weight'", "not implemented yet: MXFP4"}},
      {"packed integers",
       with("ct.weight_packed", "I32", {3, 4}, 48),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_packed'", "not implemented yet", "pack-quantized"}},
      {"both dialects",
       [](SafetensorsWriter& writer) { writer.add("ct.weight", "U8", {1}, "x"); },
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_packed'", "'ct.weight' too"}},
      {"ModelOpt: K of 24",
       with("mo.weight", "U8", {3, 12}, 36),
       "mo",
       kRows,
       24,
       {"'mo.weight'", "multiple of 16, found 24"}},
      {"packed: K of 40",
       with("ct.weight_packed", "U8", {3, 20}, 60),
       "ct",
       kRows,
       40,
       {"multiple of 16, found 40"}},
      {"negative K", nothing, "mo", kRows, -32, {"'mo.weight'", "multiple of 16, found -32"}},
      {"ModelOpt: U8 of the wrong shape",
       nothing,
       "mo",
       kRows,
       64,
       {"tensor 'mo.weight': wanted BF16, F16 or F32 [3, 64], or NVFP4 as U8 [3, 32], found U8 [3, 16]"}},
      {"packed: wrong rows",
       nothing,
       "ct",
       5,
       kColumns,
       {"'ct.weight_packed': wanted U8 [5, 16], found U8 [3, 16]"}},
      {"packed: wrong dtype",
       with("ct.weight_packed", "I8", {3, 16}, 48),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_packed': wanted U8 [3, 16], found I8 [3, 16]"}},
      {"ModelOpt: no block scale",
       without("mo.weight_scale"),
       "mo",
       kRows,
       kColumns,
       {"tensor 'mo.weight_scale': is missing", "'mo.weight' (U8) needs it"}},
      {"ModelOpt: no tensor scale",
       without("mo.weight_scale_2"),
       "mo",
       kRows,
       kColumns,
       {"tensor 'mo.weight_scale_2': is missing", "'mo.weight' (U8) needs it"}},
      {"packed: no block scale",
       without("ct.weight_scale"),
       "ct",
       kRows,
       kColumns,
       {"tensor 'ct.weight_scale': is missing", "'ct.weight_packed' (U8) needs it"}},
      {"packed: no global scale",
       without("ct.weight_global_scale"),
       "ct",
       kRows,
       kColumns,
       {"tensor 'ct.weight_global_scale': is missing"}},
      {"block scale: shape",
       with("mo.weight_scale", "F8_E4M3", {2, 3}, 6),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale': wanted F8_E4M3 [3, 2], found F8_E4M3 [2, 3]"}},
      {"block scale: dtype",
       with("ct.weight_scale", "F16", {3, 2}, 12),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_scale': wanted F8_E4M3 [3, 2], found F16 [3, 2]"}},
      {"NaN block scale",
       bad_scale("mo.weight_scale", 3, 0x7F),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale'", "row 1, column 1 is NaN (byte 0x7f)"}},
      {"negative NaN block scale",
       bad_scale("ct.weight_scale", 4, static_cast<char>(0xFF)),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_scale'", "row 2, column 0 is NaN (byte 0xff)"}},
      {"tensor scale: two",
       with("mo.weight_scale_2", "F32", {2}, 8),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale_2': wanted F32 [1], found F32 [2]"}},
      {"tensor scale: none",
       with("mo.weight_scale_2", "F32", {0}, 0),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale_2': wanted F32 [1], found F32 [0]"}},
      {"tensor scale: two dims",
       with("mo.weight_scale_2", "F32", {1, 1}, 4),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale_2': wanted F32 [], found F32 [1, 1]"}},
      {"tensor scale: dtype",
       with("ct.weight_global_scale", "BF16", {1}, 2),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_global_scale': wanted F32 [1], found BF16 [1]"}},
      {"tensor scale: NaN",
       with_f32("mo.weight_scale_2", kNan),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale_2'", "finite", "nan"}},
      {"tensor scale: inf",
       with_f32("mo.weight_scale_2", kInf),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale_2'", "finite", "inf"}},
      {"tensor scale: negative",
       with_f32("mo.weight_scale_2", -1),
       "mo",
       kRows,
       kColumns,
       {"'mo.weight_scale_2'", "at least 0", "-1"}},
      {"global scale: NaN",
       with_f32("ct.weight_global_scale", kNan),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_global_scale'", "finite", "nan"}},
      {"global scale: inf",
       with_f32("ct.weight_global_scale", kInf),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_global_scale'", "finite", "inf"}},
      {"global scale: 0",
       with_f32("ct.weight_global_scale", 0),
       "ct",
       kRows,
       kColumns,
       {"'ct.weight_global_scale'", "above 0", "found 0"}},
      {"global scale: negative",
       with_f32("ct.weight_global_scale", -4),
       "ct",
       kRows,
       kColumns,
       {"above 0", "found -4"}},
      {"global scale: 1/x overflows",
       with_f32("ct.weight_global_scale", 1e-45f),
       "ct",
       kRows,
       kColumns,
       {"finite reciprocal"}},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.what);
    SafetensorsWriter writer = good_model();
    bad.change(writer);
    Checkpoint checkpoint = opened(writer);
    expect_bad(checkpoint.matrix(bad.prefix, bad.n, bad.k).status(), bad.fragments);
  }
}

TEST(CheckpointErrors, BadVectors) {
  SafetensorsWriter writer = good_model();
  writer.add("nan", "F32", {3}, bytes_of(std::vector<float>{1, 2, kNan}));
  writer.add("inf", "BF16", {2}, bytes_of(std::vector<uint16_t>{0x3F80, 0xFF80}));
  writer.add("half", "F16", {1}, bytes_of(std::vector<uint16_t>{0x7E00}));
  writer.add("ints", "I64", {1}, std::string(8, 'x'));
  writer.add("a\\nb", "I64", {1}, std::string(8, 'x'));
  Checkpoint checkpoint = opened(writer);
  expect_bad(checkpoint.floats("nan", Shape{3}).status(),
             {kFile, "tensor 'nan'", "finite", "found nan at 2"});
  expect_bad(checkpoint.floats("inf", Shape{2}).status(), {kFile, "tensor 'inf'", "found -inf at 1"});
  expect_bad(checkpoint.floats("half", Shape{1}).status(), {kFile, "tensor 'half'", "found nan at 0"});
  expect_bad(checkpoint.floats("ints", Shape{1}).status(),
             {"m/model.safetensors: tensor 'ints': wanted BF16, F16 or F32 [1], found I64 [1]"});
  expect_bad(checkpoint.floats("norm.weight", Shape{5}).status(),
             {"wanted BF16, F16 or F32 [5], found F32 [4]"});
  expect_bad(checkpoint.floats("norm.weight", Shape{}).status(),
             {"wanted BF16, F16 or F32 [], found F32 [4]"});
  expect_bad(checkpoint.floats("norm.wait", Shape{4}).status(), {"'norm.wait': is missing", "'norm.weight'"});
  expect_bad(checkpoint.tensor("norm.weight", Shape{2, 2}).status(), {"wanted shape [2, 2], found F32 [4]"});
  expect_bad(checkpoint.tensor("norm.weight", Shape{4}, {DType::kI8}).status(),
             {"wanted I8 [4], found F32 [4]"});
  expect_bad(checkpoint.floats("a\nb", Shape{1}).status(), {R"('a\x0ab')"});
  // What failed is not used.
  EXPECT_EQ(checkpoint.unused().size(), 15u - 3u);
}

TEST(CheckpointErrors, NearestNameAcrossRoots) {
  SafetensorsWriter writer;
  writer.add("language_model.model.layers.3.mlp.up_proj.weight", "U8", {1}, "x");
  writer.add("language_model.model.layers.2.mlp.up_proj.weight", "U8", {1}, "x");
  expect_bad(opened(writer).matrix("model.layers.3.mlp.up_proj", 1, 1).status(),
             {"nearest name there is 'language_model.model.layers.3.mlp.up_proj.weight'"});
}

}  // namespace
}  // namespace nibble
