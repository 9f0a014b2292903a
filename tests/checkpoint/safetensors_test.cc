#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include "base/faulty_file.h"
#include "checkpoint/write_safetensors.h"

namespace nibble {
namespace {

Result<SafetensorsHeader> parse(std::string bytes) {
  return read_safetensors_header(*memory_file("m.safetensors", std::move(bytes)));
}

TEST(Safetensors, EveryDType) {
  SafetensorsWriter writer;
  int64_t count = 0;
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i) {
    const auto dtype = static_cast<DType>(i);
    writer.add(fmt::format("t{}", i), std::string(dtype_name(dtype)), {2, 3},
               std::string(static_cast<size_t>(6 * dtype_bytes(dtype)), 'x'));
    ++count;
  }
  const std::string file = writer.file();
  Result<SafetensorsHeader> header = parse(file);
  ASSERT_TRUE(header.ok()) << header.status().message();
  ASSERT_EQ(std::ssize(header->tensors), count);
  int64_t begin = 8 + std::ssize(writer.header());
  for (int i = 0; i < static_cast<int>(count); ++i) {
    const TensorInfo& tensor = header->tensors[static_cast<size_t>(i)];
    EXPECT_EQ(tensor.name, fmt::format("t{}", i));
    EXPECT_EQ(tensor.dtype, static_cast<DType>(i));
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(tensor.begin, begin);
    EXPECT_EQ(tensor.bytes, 6 * dtype_bytes(tensor.dtype));
    begin += tensor.bytes;
  }
  EXPECT_EQ(begin, std::ssize(file));
}

TEST(Safetensors, ScalarsAndEmptyTensors) {
  SafetensorsWriter writer;
  writer.add("none", "F32", {3, 0, 5}, "").add("scalar", "F32", {}, "abcd").add("none too", "F32", {0}, "");
  Result<SafetensorsHeader> header = parse(writer.pad(3).file());
  ASSERT_TRUE(header.ok()) << header.status().message();
  EXPECT_EQ(header->tensors.size(), 3u);
  EXPECT_TRUE(parse(safetensors("{}")).ok());
}

TEST(Safetensors, OrderInTheFileNotInTheHeader) {
  Result<SafetensorsHeader> header =
      parse(safetensors(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                        R"("b":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"}})",
                        "xyz"));
  ASSERT_TRUE(header.ok()) << header.status().message();
  EXPECT_EQ(header->tensors[0].name, "b");
  EXPECT_EQ(header->tensors[1].name, "a");
}

TEST(Safetensors, HeaderOfAFileThatCannotBeMapped) {
  FaultyFileSystem files;
  SafetensorsWriter writer;
  files.add_file("d/m", writer.add("a", "U8", {3}, "abc").file());
  files.refuse_map("d/m");
  Result<std::unique_ptr<File>> file = files.open("d/m");
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->map().empty());
  Result<SafetensorsHeader> header = read_safetensors_header(**file);
  ASSERT_TRUE(header.ok()) << header.status().message();
  EXPECT_EQ(header->tensors[0].name, "a");
}

TEST(Safetensors, HeaderThatCannotBeRead) {
  FaultyFileSystem files;
  SafetensorsWriter writer;
  files.add_file("d/m", writer.add("a", "U8", {3}, "abc").file());
  files.fail_read_at("d/m", 20);
  Result<SafetensorsHeader> header = read_safetensors_header(**files.open("d/m"));
  ASSERT_FALSE(header.ok());
  EXPECT_EQ(header.status().message(), "d/m: reading at byte 8 failed: Input/output error");
}

TEST(Safetensors, EveryTruncationIsAnError) {
  SafetensorsWriter writer;
  const std::string file = writer.add("a", "U8", {5}, "abcde").add("b", "F32", {1}, "wxyz").file();
  ASSERT_TRUE(parse(file).ok());
  for (size_t size = 0; size < file.size(); ++size) {
    Result<SafetensorsHeader> header = parse(file.substr(0, size));
    ASSERT_FALSE(header.ok()) << size;
    EXPECT_NE(header.status().message().find("truncated"), std::string::npos) << header.status().message();
  }
}

// The parser keeps no stack and no tree, so depth and size cost nothing.
TEST(Safetensors, DeepNesting) {
  const std::string deep(1'000'000, '[');
  EXPECT_FALSE(parse(safetensors(deep)).ok());
  EXPECT_FALSE(parse(safetensors(R"({"a":)" + deep)).ok());
  EXPECT_FALSE(parse(safetensors(R"({"__metadata__":)" + deep)).ok());
  EXPECT_FALSE(parse(safetensors(R"({"a":{"shape":)" + deep)).ok());
  std::string objects;
  for (int i = 0; i < 200'000; ++i) objects += R"({"a":)";
  EXPECT_FALSE(parse(safetensors(objects)).ok());
}

struct BadCase {
  const char* what;
  std::string file;
  std::vector<std::string> fragments;  // that the message must have
};

std::string one_tensor(const std::string& fields, const std::string& data = "abcd") {
  return safetensors(R"({"t":{)" + fields + "}}", data);
}

std::vector<BadCase> bad_cases() {
  const std::string good = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  auto shape = [](const std::string& dims) {
    return one_tensor(R"("dtype":"U8","data_offsets":[0,4],"shape":)" + dims);
  };
  auto offsets = [](const std::string& pair) {
    return one_tensor(R"("dtype":"U8","shape":[4],"data_offsets":)" + pair);
  };
  return {
      {"empty file", "", {"truncated", "0 bytes"}},
      {"7-byte file", "1234567", {"truncated", "7 bytes"}},
      {"no header", safetensors(""), {"does not begin with '{'"}},
      {"header length beyond the file", safetensors("{}", "", 100), {"truncated", "10 bytes", "byte 108"}},
      {"header length over the limit", safetensors("{}", "", 100'000'001), {"100000001", "100000000"}},
      {"header length of 2^64-1", safetensors("{}", "", ~0ull), {"18446744073709551615"}},
      {"git lfs pointer",
       "version https://git-lfs.github.com/spec/v1\n",
       {"Git LFS pointer", "git lfs pull"}},
      {"not JSON", safetensors("{hello}"), {"header", "not valid JSON", "byte 2"}},
      {"JSON cut short", safetensors("{\"a\":{"), {"header", "not valid JSON"}},
      {"two documents", safetensors("{}{}"), {"not valid JSON"}},
      {"not UTF-8", safetensors("{\"\xff\":1}"), {"not valid JSON"}},
      {"array", safetensors("[]"), {"not a JSON object"}},
      {"number", safetensors("12"), {"not a JSON object"}},
      {"leading space", safetensors(" {}"), {"does not begin with '{'"}},
      {"byte order mark", safetensors("\xEF\xBB\xBF{}"), {"does not begin with '{'"}},
      {"tensor is a number", safetensors(R"({"t":3})"), {"tensor 't'", "wanted an object", "a number"}},
      {"tensor is an array", safetensors(R"({"t":[]})"), {"tensor 't'", "an array"}},
      {"metadata is an array", safetensors(R"({"__metadata__":[]})"), {"__metadata__", "an array"}},
      {"metadata of numbers", safetensors(R"({"__metadata__":{"a":1}})"), {"__metadata__", "a number"}},
      {"metadata of objects", safetensors(R"({"__metadata__":{"a":{}}})"), {"__metadata__", "an object"}},
      {"metadata twice", safetensors(R"({"__metadata__":{},"__metadata__":{}})"), {"__metadata__", "twice"}},
      {"metadata key twice",
       safetensors(R"({"__metadata__":{"k":"","k":""}})"),
       {"__metadata__", "'k'", "twice"}},
      {"tensor twice", safetensors("{" + good + "," + good + "}", "abcd"), {"tensor 'a'", "twice"}},
      {"dtype twice", one_tensor(R"("dtype":"U8","dtype":"U8")"), {"tensor 't'", "'dtype'", "twice"}},
      {"shape twice", one_tensor(R"("shape":[4],"shape":[4])"), {"tensor 't'", "'shape'", "twice"}},
      {"offsets twice",
       one_tensor(R"("data_offsets":[0,4],"data_offsets":[0,4])"),
       {"'data_offsets'", "twice"}},
      {"no dtype", one_tensor(R"("shape":[4],"data_offsets":[0,4])"), {"tensor 't'", "'dtype' is missing"}},
      {"no shape", one_tensor(R"("dtype":"U8","data_offsets":[0,4])"), {"tensor 't'", "'shape' is missing"}},
      {"no offsets", one_tensor(R"("dtype":"U8","shape":[4])"), {"tensor 't'", "'data_offsets' is missing"}},
      {"unknown field", one_tensor(R"("dtype":"U8","strides":[1])"), {"tensor 't'", "unknown", "'strides'"}},
      {"unknown dtype", one_tensor(R"("dtype":"F4")"), {"tensor 't'", "'F4'"}},
      {"dtype is a number",
       one_tensor(R"("dtype":7)"),
       {"tensor 't'", "dtype", "wanted a string", "a number"}},
      {"dtype is an array", one_tensor(R"("dtype":["U8"])"), {"dtype", "wanted a string", "an array"}},
      {"shape is a string", shape(R"("4")"), {"shape", "wanted an array", "a string"}},
      {"shape is null", shape("null"), {"shape", "wanted an array", "null"}},
      {"negative dim", shape("[-4]"), {"tensor 't'", "shape", "negative"}},
      {"dim is a fraction", shape("[4.0]"), {"tensor 't'", "shape", "fraction"}},
      {"dim is a string", shape(R"(["4"])"), {"tensor 't'", "shape", "a string"}},
      {"dim is an array", shape("[[4]]"), {"tensor 't'", "shape", "an array"}},
      {"dim is true", shape("[true]"), {"tensor 't'", "shape", "a boolean"}},
      {"dim of 2^63", shape("[9223372036854775808]"), {"tensor 't'", "9223372036854775808"}},
      {"dim of 2^64", shape("[18446744073709551616]"), {"tensor 't'", "shape", "too large"}},
      {"dim of 1e30", shape("[1e30]"), {"tensor 't'", "shape", "too large"}},
      {"dim of 1e999", shape("[1e999]"), {"not valid JSON"}},
      {"product of 2^64",
       shape("[4294967296,4294967296]"),
       {"tensor 't'", "[4294967296, 4294967296]", "63 bits"}},
      {"bytes of 2^63",
       one_tensor(R"("dtype":"F64","shape":[1152921504606846976],"data_offsets":[0,4])"),
       {"tensor 't'", "63 bits"}},
      {"9 dims", shape("[1,1,1,1,1,1,1,1,4]"), {"tensor 't'", "more than 8 dims"}},
      {"bytes do not match", shape("[5]"), {"tensor 't'", "U8 [5] has 5 bytes", "[0, 4] span 4"}},
      {"fewer bytes than the span", shape("[3]"), {"tensor 't'", "U8 [3] has 3 bytes", "[0, 4] span 4"}},
      {"no offset", offsets("[]"), {"tensor 't'", "wanted 2 numbers, found 0"}},
      {"one offset", offsets("[0]"), {"tensor 't'", "wanted 2 numbers, found 1"}},
      {"three offsets", offsets("[0,4,8]"), {"tensor 't'", "wanted 2 numbers"}},
      {"reversed offsets", offsets("[4,0]"), {"tensor 't'", "[4, 0]", "end before they begin"}},
      {"negative offset", offsets("[-4,0]"), {"tensor 't'", "data_offsets", "negative"}},
      {"offsets beyond 64 bits", offsets("[18446744073709551611,18446744073709551615]"), {"data_offsets"}},
      {"offsets near 2^63", offsets("[9223372036854775803,9223372036854775807]"), {"truncated", "63 bits"}},
      {"offsets are an object", offsets("{}"), {"data_offsets", "wanted an array", "an object"}},
      {"hole at the start",
       one_tensor(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])"),
       {"tensor 't'", "hole"}},
      {"hole",
       safetensors("{" + good + R"(,"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}})", "abcdef"),
       {"tensor 'b'", "5", "4", "hole"}},
      {"overlap",
       safetensors("{" + good + R"(,"b":{"dtype":"U8","shape":[3],"data_offsets":[3,6]}})", "abcdef"),
       {"tensor 'b'", "inside tensor 'a'", "overlap"}},
      {"empty tensor inside another",
       safetensors("{" + good + R"(,"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", "abcd"),
       {"tensor 'b'", "overlap"}},
      {"data cut short", safetensors("{" + good + "}", "abc"), {"truncated", "header describes"}},
      {"trailing bytes", safetensors("{" + good + "}", "abcdefg"), {"3 bytes after the last tensor"}},
      {"newline in a name", safetensors("{\"a\\nb\":3}"), {"tensor 'a\\x0ab'"}},
      {"newline in a dtype", one_tensor(R"("dtype":"\n\u0000")"), {R"('\x0a\x00')"}},
  };
}

TEST(Safetensors, BadFiles) {
  for (const BadCase& bad : bad_cases()) {
    SCOPED_TRACE(bad.what);
    Result<SafetensorsHeader> header = parse(bad.file);
    ASSERT_FALSE(header.ok());
    const std::string& message = header.status().message();
    EXPECT_EQ(header.status().code(), ErrorCode::kUser);
    EXPECT_TRUE(message.starts_with("m.safetensors: ")) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& fragment : bad.fragments)
      EXPECT_NE(message.find(fragment), std::string::npos) << message << "\nlacks " << fragment;
  }
}

TEST(Safetensors, LongNamesAreShortened) {
  Result<SafetensorsHeader> header = parse(safetensors("{\"" + std::string(1'000'000, 'n') + "\":3}"));
  ASSERT_FALSE(header.ok());
  EXPECT_LT(header.status().message().size(), 400u);
}

}  // namespace
}  // namespace nibble
