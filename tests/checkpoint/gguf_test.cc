#include "checkpoint/gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/faulty_file.h"
#include "checkpoint/write_gguf.h"
#include "checkpoint/write_safetensors.h"

namespace nibble {
namespace {

constexpr uint32_t kF32 = 0, kQ4_0 = 2, kQ8_0 = 8, kIq2Xxs = 16;

Result<GgufHeader> parse(std::string bytes) {
  return read_gguf_header(*memory_file("m.gguf", std::move(bytes)));
}

GgufMetadata metadata_of(const GgufWriter& writer) {
  Result<GgufHeader> header = parse(writer.file());
  EXPECT_TRUE(header.ok()) << header.status().message();
  return std::move(header->metadata);
}

GgufWriter small_model() {
  GgufWriter writer;
  return writer.text("general.architecture", "llama")
      .u32("llama.block_count", 2)
      .tensor("a", {2, 3}, kF32, bytes_of<float>({1, 2, 3, 4, 5, 6}))
      .tensor("e", {32, 2, 2}, kQ8_0, std::string(4 * 34, '\x01'))
      .tensor("v", {3}, kF32, bytes_of<float>({7, 8, 9}));
}

TEST(Gguf, VersionsTwoAndThree) {
  for (uint32_t version : {2U, 3U}) {
    const std::string file = small_model().version(version).file();
    Result<GgufHeader> header = parse(file);
    ASSERT_TRUE(header.ok()) << header.status().message();
    EXPECT_EQ(header->version, version);
    EXPECT_EQ(header->alignment, 32);
    ASSERT_EQ(header->tensors.size(), 3u);
    const GgufTensorInfo& experts = header->tensors[1];
    EXPECT_EQ(experts.name, "e");
    EXPECT_EQ(experts.type->name, "Q8_0");
    EXPECT_EQ(experts.shape, (std::vector<int64_t>{2, 2, 32}));
    EXPECT_EQ(experts.bytes, 4 * 34);
    EXPECT_EQ(experts.begin % 32, 0);
    EXPECT_EQ(header->tensors[0].shape, (std::vector<int64_t>{3, 2}));
    EXPECT_EQ(header->tensors[2].begin + header->tensors[2].bytes, std::ssize(file));
  }
}

TEST(Gguf, OwnAlignment) {
  for (uint32_t alignment : {8U, 64U, 4096U, 1U << 20}) {
    GgufWriter writer;
    writer.align(alignment).u32("general.alignment", alignment);
    writer.tensor("a", {1}, kF32, "abcd").tensor("b", {1}, kF32, "efgh");
    Result<GgufHeader> header = parse(writer.file());
    ASSERT_TRUE(header.ok()) << header.status().message();
    EXPECT_EQ(header->alignment, alignment);
    EXPECT_EQ(header->tensors[1].begin - header->tensors[0].begin, alignment);
  }
}

TEST(Gguf, NoTensorsAndNoMetadata) {
  Result<GgufHeader> header = parse(GgufWriter().file());
  ASSERT_TRUE(header.ok()) << header.status().message();
  EXPECT_TRUE(header->tensors.empty());
  EXPECT_TRUE(header->metadata.values().empty());
}

TEST(Gguf, EveryMetadataType) {
  const GgufMetadata metadata =
      metadata_of(GgufWriter()
                      .value("u8", GgufValueType::kU8, number_bytes<uint8_t>(200))
                      .value("i8", GgufValueType::kI8, number_bytes<int8_t>(-100))
                      .value("u16", GgufValueType::kU16, number_bytes<uint16_t>(60000))
                      .value("i16", GgufValueType::kI16, number_bytes<int16_t>(-30000))
                      .value("u32", GgufValueType::kU32, number_bytes<uint32_t>(4000000000))
                      .value("i32", GgufValueType::kI32, number_bytes<int32_t>(-2000000000))
                      .value("f32", GgufValueType::kF32, number_bytes<float>(0.5F))
                      .boolean("true", true)
                      .boolean("false", false)
                      .text("text", "h\xc3\xa4llo")
                      .text("empty", "")
                      .value("u64", GgufValueType::kU64, number_bytes<uint64_t>(1ULL << 40))
                      .value("i64", GgufValueType::kI64, number_bytes<int64_t>(-(1LL << 40)))
                      .value("f64", GgufValueType::kF64, number_bytes<double>(-1e100)));
  constexpr int64_t kLow = std::numeric_limits<int64_t>::min(), kHigh = std::numeric_limits<int64_t>::max();
  const std::pair<const char*, int64_t> integers[] = {
      {"u8", 200},           {"i8", -100},         {"u16", 60000},     {"i16", -30000},
      {"u32", 4000000000LL}, {"i32", -2000000000}, {"u64", 1LL << 40}, {"i64", -(1LL << 40)}};
  for (const auto& [key, wanted] : integers) {
    EXPECT_EQ(metadata.integer(key, kLow, kHigh).value(), wanted) << key;
    EXPECT_EQ(metadata.number(key).value(), static_cast<double>(wanted)) << key;
    EXPECT_FALSE(metadata.integer(key, wanted + 1, kHigh).ok());
    EXPECT_FALSE(metadata.integer(key, kLow, wanted - 1).ok());
    EXPECT_FALSE(metadata.text(key).ok());
    EXPECT_FALSE(metadata.boolean(key).ok());
  }
  EXPECT_EQ(metadata.number("f32").value(), 0.5);
  EXPECT_EQ(metadata.number("f64").value(), -1e100);
  EXPECT_FALSE(metadata.integer("f32", kLow, kHigh).ok());
  EXPECT_TRUE(metadata.boolean("true").value());
  EXPECT_FALSE(metadata.boolean("false").value());
  EXPECT_FALSE(metadata.integer("true", kLow, kHigh).ok());
  EXPECT_EQ(metadata.text("text").value(), "h\xc3\xa4llo");
  EXPECT_EQ(metadata.text("empty").value(), "");
  EXPECT_EQ(metadata.values().size(), 14u);
}

TEST(Gguf, EveryArrayType) {
  const GgufMetadata metadata =
      metadata_of(GgufWriter()
                      .array("u8", GgufValueType::kU8, 2, bytes_of<uint8_t>({1, 255}))
                      .array("i8", GgufValueType::kI8, 2, bytes_of<int8_t>({1, -1}))
                      .array("u16", GgufValueType::kU16, 2, bytes_of<uint16_t>({1, 65535}))
                      .array("i16", GgufValueType::kI16, 2, bytes_of<int16_t>({1, -1}))
                      .array("u32", GgufValueType::kU32, 2, bytes_of<uint32_t>({1, 4294967295U}))
                      .array("i32", GgufValueType::kI32, 2, bytes_of<int32_t>({1, -1}))
                      .array("u64", GgufValueType::kU64, 2, bytes_of<uint64_t>({1, 1ULL << 62}))
                      .array("i64", GgufValueType::kI64, 2, bytes_of<int64_t>({1, -1}))
                      .array("f32", GgufValueType::kF32, 2, bytes_of<float>({0.5F, -3}))
                      .array("f64", GgufValueType::kF64, 1, bytes_of<double>({0.1}))
                      .array("bool", GgufValueType::kBool, 3, std::string("\1\0\1", 3))
                      .texts("text", {"a", "", "\xe4\xbd\xa0"})
                      .array("none", GgufValueType::kU32, 0, ""));
  constexpr int64_t kLow = std::numeric_limits<int64_t>::min(), kHigh = std::numeric_limits<int64_t>::max();
  using Integers = std::vector<int64_t>;
  EXPECT_EQ(metadata.integers("u8", kLow, kHigh).value(), (Integers{1, 255}));
  EXPECT_EQ(metadata.integers("u16", kLow, kHigh).value(), (Integers{1, 65535}));
  EXPECT_EQ(metadata.integers("u32", kLow, kHigh).value(), (Integers{1, 4294967295}));
  EXPECT_EQ(metadata.integers("u64", kLow, kHigh).value(), (Integers{1, 1LL << 62}));
  for (const char* key : {"i8", "i16", "i32", "i64"})
    EXPECT_EQ(metadata.integers(key, kLow, kHigh).value(), (Integers{1, -1})) << key;
  EXPECT_FALSE(metadata.integers("i8", 0, 5).ok());
  EXPECT_FALSE(metadata.integers("f32", kLow, kHigh).ok());
  EXPECT_FALSE(metadata.integers("text", kLow, kHigh).ok());
  EXPECT_EQ(metadata.numbers("f32").value(), (std::vector<double>{0.5, -3}));
  EXPECT_EQ(metadata.numbers("f64").value(), (std::vector<double>{0.1}));
  EXPECT_EQ(metadata.numbers("i8").value(), (std::vector<double>{1, -1}));
  EXPECT_EQ(metadata.booleans("bool").value(), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(metadata.texts("text").value(), (std::vector<std::string>{"a", "", "\xe4\xbd\xa0"}));
  EXPECT_EQ(metadata.integers("none", 0, 0).value(), Integers{});
  EXPECT_EQ(metadata.integer_each("u8", 2, 0, 300).value(), (Integers{1, 255}));
}

TEST(Gguf, MetadataErrorsNameFileKeyWantedAndFound) {
  const GgufMetadata metadata =
      metadata_of(GgufWriter()
                      .u32("n", 7)
                      .text("s", "a\nb")
                      .value("nan", GgufValueType::kF32, number_bytes(std::nanf("")))
                      .value("big", GgufValueType::kU64, number_bytes(~uint64_t{0}))
                      .texts("list", {"x", "y"})
                      .array("numbers", GgufValueType::kF32, 2, bytes_of<float>({1, std::nanf("")})));
  EXPECT_EQ(metadata.integer("n", 0, 6).status().message(),
            "m.gguf: metadata 'n': wanted an integer from 0 to 6, found the u32 7");
  EXPECT_EQ(metadata.integer("big", 0, std::numeric_limits<int64_t>::max()).status().message(),
            "m.gguf: metadata 'big': wanted an integer of at least 0, found the u64 18446744073709551615");
  EXPECT_EQ(metadata.integer("s", 0, 6).status().message(),
            "m.gguf: metadata 's': wanted an integer from 0 to 6, found the string 'a\\x0ab'");
  EXPECT_EQ(metadata.text("list").status().message(),
            "m.gguf: metadata 'list': wanted a string, found an array of 2 strings");
  EXPECT_EQ(metadata.boolean("gone").status().message(),
            "m.gguf: metadata 'gone': wanted a bool, found nothing");
  EXPECT_EQ(metadata.number("nan").status().message(),
            "m.gguf: metadata 'nan': wanted a finite number, found the f32 nan");
  EXPECT_EQ(metadata.numbers("numbers").status().message(),
            "m.gguf: metadata 'numbers': wanted an array of finite numbers, found the f32 nan at 1");
  EXPECT_EQ(metadata.texts("s").status().message(),
            "m.gguf: metadata 's': wanted an array of strings, found the string 'a\\x0ab'");
  EXPECT_EQ(metadata.integer_each("numbers", 3, 0, 9).status().message(),
            "m.gguf: metadata 'numbers': wanted an integer or an array of 3, found an array of 2 f32");
  EXPECT_EQ(metadata.integer("gone", 0, 9, 4).value(), 4);
  EXPECT_EQ(metadata.text("gone", "else").value(), "else");
  EXPECT_EQ(metadata.integer_each("n", 3, 0, 9).value(), (std::vector<int64_t>{7, 7, 7}));
}

TEST(Gguf, TensorsMappedAndReadAreTheSame) {
  for (bool maps : {true, false}) {
    FaultyFileSystem files;
    files.add_file("m.gguf", small_model().file());
    if (!maps) files.refuse_map("m.gguf");
    Result<Gguf> gguf = Gguf::open(files, "m.gguf");
    ASSERT_TRUE(gguf.ok()) << gguf.status().message();
    EXPECT_EQ(gguf->tensors().size(), 3u);
    EXPECT_EQ(gguf->total_bytes(), 24 + 4 * 34 + 12);
    EXPECT_EQ(gguf->unused(), (std::vector<std::string>{"a", "e", "v"}));
    const int64_t shape[] = {3, 2};
    Result<GgufTensorView> view = gguf->tensor("a", shape, {GgufType::kF16, GgufType::kF32});
    ASSERT_TRUE(view.ok()) << view.status().message();
    EXPECT_EQ(view->type(), GgufType::kF32);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(view->bytes.data()), view->bytes.size()),
              bytes_of<float>({1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(gguf->tensor("a", shape)->bytes.data(), view->bytes.data());
    EXPECT_EQ(gguf->floats("a", shape).value(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
    const int64_t experts[] = {2, 2, 32};
    Result<std::vector<float>> values = gguf->floats("e", experts);
    ASSERT_TRUE(values.ok()) << values.status().message();
    ASSERT_EQ(values->size(), 128u);
    for (float value : *values) EXPECT_EQ(value, std::ldexp(257.0F, -24));  // f16 0x0101 times 1
    gguf->ignore("v");
    EXPECT_TRUE(gguf->unused().empty());
  }
}

// Headers are read through a window of some KiB where the file cannot be mapped.
TEST(Gguf, HeaderOfManyWindows) {
  std::vector<std::string> tokens;
  for (size_t i = 0; i < 20000; ++i) tokens.push_back(std::string(i % 23, static_cast<char>('a' + i % 26)));
  GgufWriter writer;
  writer.texts("tokens", tokens).text("long", std::string(200000, 'x')).u32("after", 7);
  for (int i = 0; i < 2000; ++i) writer.tensor(fmt::format("t{}", i), {1}, kF32, bytes_of<float>({1.0F * i}));
  for (bool maps : {true, false}) {
    FaultyFileSystem files;
    files.add_file("m.gguf", writer.file());
    if (!maps) files.refuse_map("m.gguf");
    Result<Gguf> gguf = Gguf::open(files, "m.gguf");
    ASSERT_TRUE(gguf.ok()) << gguf.status().message();
    EXPECT_EQ(gguf->metadata().texts("tokens").value(), tokens);
    EXPECT_EQ(gguf->metadata().text("long").value(), std::string(200000, 'x'));
    EXPECT_EQ(gguf->metadata().integer("after", 0, 9).value(), 7);
    ASSERT_EQ(gguf->tensors().size(), 2000u);
    const int64_t shape[] = {1};
    EXPECT_EQ(gguf->floats("t1999", shape).value()[0], 1999);
  }
}

TEST(Gguf, TensorErrorsNameFileTensorWantedAndFound) {
  FaultyFileSystem files;
  files.add_file("m.gguf", small_model()
                               .tensor("odd", {256}, kIq2Xxs, std::string(66, 'x'))
                               .tensor("nan", {1}, kF32, bytes_of<float>({std::nanf("")}))
                               .file());
  Result<Gguf> gguf = Gguf::open(files, "m.gguf");
  ASSERT_TRUE(gguf.ok()) << gguf.status().message();
  const int64_t shape[] = {2, 3}, one[] = {1}, row[] = {256};
  EXPECT_EQ(gguf->tensor("gone", shape).status().message(), "m.gguf: tensor 'gone': is missing");
  EXPECT_EQ(gguf->tensor("a", shape, {GgufType::kF32}).status().message(),
            "m.gguf: tensor 'a': wanted [2, 3] (one of F32), found F32 [3, 2]");
  EXPECT_EQ(gguf->tensor("odd", row).status().message(),
            "m.gguf: tensor 'odd': wanted [256] (one of F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16, MXFP4, "
            "NVFP4), found IQ2_XXS [256]");
  EXPECT_EQ(gguf->floats("nan", one).status().message(),
            "m.gguf: tensor 'nan': wanted finite values, found nan at 0");
  EXPECT_EQ(gguf->info("odd")->type->name, "IQ2_XXS");
}

TEST(Gguf, DataThatCannotBeRead) {
  FaultyFileSystem files;
  const std::string file = small_model().file();
  files.add_file("m.gguf", file);
  files.fail_read_at("m.gguf", std::ssize(file) - 1);
  // A file that small is read whole with its header; larger ones fail where they are read.
  EXPECT_EQ(Gguf::open(files, "m.gguf").status().message(),
            "m.gguf: reading at byte 0 failed: Input/output error");
  GgufWriter large;
  large.tensor("a", {32768}, kF32, std::string(131072, '\0'));
  files.add_file("l.gguf", large.file());
  files.fail_read_at("l.gguf", std::ssize(large.file()) - 1);
  Result<Gguf> gguf = Gguf::open(files, "l.gguf");
  ASSERT_TRUE(gguf.ok()) << gguf.status().message();
  const int64_t shape[] = {32768};
  Status status = gguf->tensor("a", shape).status();
  EXPECT_TRUE(status.message().starts_with("l.gguf: tensor 'a': cannot be read: ")) << status.message();
}

// Three parts; the first has no tensors, as some writers do it.
void add_parts(FaultyFileSystem& files) {
  files.add_file("d/x-00001-of-00003.gguf",
                 GgufWriter().text("general.architecture", "llama").split(0, 3, 3).file());
  files.add_file("d/x-00002-of-00003.gguf", GgufWriter()
                                                .split(1, 3, 3)
                                                .tensor("a", {1}, kF32, bytes_of<float>({1}))
                                                .tensor("b", {1}, kF32, bytes_of<float>({2}))
                                                .file());
  files.add_file("d/x-00003-of-00003.gguf",
                 GgufWriter().split(2, 3, 3).tensor("c", {1}, kF32, bytes_of<float>({3})).file());
}

TEST(GgufParts, AllFromTheFirst) {
  FaultyFileSystem files;
  add_parts(files);
  Result<Gguf> gguf = Gguf::open(files, "d/x-00001-of-00003.gguf");
  ASSERT_TRUE(gguf.ok()) << gguf.status().message();
  EXPECT_EQ(gguf->metadata().text("general.architecture").value(), "llama");
  const int64_t shape[] = {1};
  EXPECT_EQ(gguf->floats("a", shape).value()[0], 1);
  EXPECT_EQ(gguf->floats("b", shape).value()[0], 2);
  EXPECT_EQ(gguf->floats("c", shape).value()[0], 3);
  EXPECT_EQ(gguf->file_of("c"), "d/x-00003-of-00003.gguf");
  Gguf moved = std::move(gguf).value();
  EXPECT_EQ(moved.floats("c", shape).value()[0], 3);
  EXPECT_EQ(moved.info("a")->bytes, 4);
}

TEST(GgufParts, BadSets) {
  struct Case {
    const char* file;
    std::optional<GgufWriter> content;  // none: not there
    const char* wanted;
  };
  GgufWriter c = GgufWriter().split(2, 3, 3).tensor("c", {1}, kF32, "abcd");
  const Case cases[] = {
      {"d/x-00002-of-00003.gguf", std::nullopt, "d/x-00002-of-00003.gguf: part 2 of 3 is missing"},
      {"d/x-00003-of-00003.gguf", std::nullopt, "d/x-00003-of-00003.gguf: part 3 of 3 is missing"},
      {"d/x-00003-of-00003.gguf", GgufWriter().split(1, 3, 3).tensor("c", {1}, kF32, "abcd"),
       "d/x-00003-of-00003.gguf: metadata 'split.no': wanted 2, as the first part and the file's name say, "
       "found "
       "the u16 1"},
      {"d/x-00003-of-00003.gguf", GgufWriter().split(2, 4, 3).tensor("c", {1}, kF32, "abcd"),
       "d/x-00003-of-00003.gguf: metadata 'split.count': wanted 3, as the first part and the file's name "
       "say, "
       "found the u16 4"},
      {"d/x-00003-of-00003.gguf", GgufWriter().split(2, 3, 4).tensor("c", {1}, kF32, "abcd"),
       "d/x-00003-of-00003.gguf: metadata 'split.tensors.count': wanted 3, as the first part and the file's "
       "name "
       "say, found the i32 4"},
      {"d/x-00003-of-00003.gguf", GgufWriter().tensor("c", {1}, kF32, "abcd"),
       "d/x-00003-of-00003.gguf: metadata 'split.no': wanted an integer from 0 to 2147483647, found nothing"},
      {"d/x-00003-of-00003.gguf", GgufWriter().split(2, 3, 3),
       "d/x-00001-of-00003.gguf: metadata 'split.tensors.count': wanted 3 tensors, found 2 in 3 parts"},
      {"d/x-00003-of-00003.gguf", GgufWriter().split(2, 3, 3).tensor("a", {1}, kF32, "abcd"),
       "d/x-00003-of-00003.gguf: tensor 'a': is also in d/x-00002-of-00003.gguf"},
      {"d/x-00003-of-00003.gguf", GgufWriter(c).magic("nope"),
       "d/x-00003-of-00003.gguf: wanted the magic 'GGUF', found 'nope': not a GGUF file"},
      {"d/x-00001-of-00003.gguf", GgufWriter().split(1, 3, 3),
       "d/x-00001-of-00003.gguf: is part 2 of 3 (split.no 1), so wanted a name that ends in "
       "'-00002-of-00003.gguf'"},
      {"d/x-00001-of-00003.gguf", GgufWriter().split(0, 2, 3),
       "d/x-00001-of-00003.gguf: is part 1 of 2 (split.no 0), so wanted a name that ends in "
       "'-00001-of-00002.gguf'"},
      {"d/x-00001-of-00003.gguf", GgufWriter().split(3, 3, 3),
       "d/x-00001-of-00003.gguf: metadata 'split.no': wanted an integer from 0 to 2, found the u16 3"},
      {"d/x-00001-of-00003.gguf", GgufWriter().split(0, 3, -1),
       "d/x-00001-of-00003.gguf: metadata 'split.tensors.count': wanted an integer from 0 to 2147483647, "
       "found "
       "the i32 -1"},
  };
  for (const Case& bad : cases) {
    FaultyFileSystem files;
    add_parts(files);
    if (bad.content.has_value()) {
      files.add_file(bad.file, bad.content->file());
    } else {
      files.hide(bad.file);
    }
    Result<Gguf> gguf = Gguf::open(files, "d/x-00001-of-00003.gguf");
    EXPECT_EQ(gguf.status().message(), bad.wanted);
  }
  FaultyFileSystem files;
  add_parts(files);
  EXPECT_EQ(Gguf::open(files, "d/x-00002-of-00003.gguf").status().message(),
            "d/x-00002-of-00003.gguf: is part 2 of 3; open the first part, d/x-00001-of-00003.gguf");
}

TEST(GgufParts, OnePartNeedsNoName) {
  FaultyFileSystem files;
  files.add_file("x.gguf", GgufWriter().split(0, 1, 1).tensor("a", {32}, kQ4_0, std::string(18, 'x')).file());
  EXPECT_TRUE(Gguf::open(files, "x.gguf").ok());
}

}  // namespace
}  // namespace nibble
