// Bad GGUF files: each fails with a message of one line that names the file and the thing, and without room
// being made for what the file only claims.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <set>

#include "base/faulty_file.h"
#include "checkpoint/gguf.h"
#include "checkpoint/write_gguf.h"

namespace {

size_t g_largest_allocation = 0;

}  // namespace

// The binary's operator new, so that a test sees the largest allocation. Sanitizers have one of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
[[gnu::noinline]] void* operator new(size_t size) {
  g_largest_allocation = std::max(g_largest_allocation, size);
  if (void* memory = std::malloc(size != 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace nibble {
namespace {

constexpr uint32_t kF32 = 0, kQ4_0 = 2, kQ4_K = 12, kNvfp4 = 40;
constexpr uint64_t kHuge = uint64_t{1} << 60;
constexpr uint32_t kU32Type = 4, kBoolType = 7, kStringType = 8, kArrayType = 9;

GgufWriter gguf() { return {}; }

std::string array_of(uint32_t type, uint64_t count, std::string_view bytes = "") {
  return number_bytes(type).append(number_bytes(count)).append(bytes);
}

// The error of these bytes, mapped and read alike.
std::string error_of(const std::string& bytes) {
  FaultyFileSystem files;
  files.add_file("m.gguf", bytes);
  g_largest_allocation = 0;
  const Status mapped = Gguf::open(files, "m.gguf").status();
  EXPECT_LE(g_largest_allocation, 4096u + bytes.size());
  files.refuse_map("m.gguf");
  g_largest_allocation = 0;
  const Status read = Gguf::open(files, "m.gguf").status();
  EXPECT_LE(g_largest_allocation, (64u << 10) + bytes.size());
  EXPECT_EQ(mapped.message(), read.message());
  if (mapped.ok()) return "no error";
  EXPECT_EQ(mapped.code(), ErrorCode::kUser);
  EXPECT_EQ(mapped.message().find('\n'), std::string::npos);
  EXPECT_TRUE(mapped.message().starts_with("m.gguf: ")) << mapped.message();
  return mapped.message().substr(std::min<size_t>(8, mapped.message().size()));
}

TEST(GgufErrors, HandMadeFiles) {
  const struct {
    std::string file, wanted;
  } cases[] = {
      // Magic and version.
      {"", "truncated: file has 0 bytes, but the magic 'GGUF' of 4 bytes begins at byte 0"},
      {"GGU", "truncated: file has 3 bytes, but the magic 'GGUF' of 4 bytes begins at byte 0"},
      {"GGUF", "truncated: file has 4 bytes, but the version of 4 bytes begins at byte 4"},
      {gguf().magic("PK\3\4").file(), "wanted the magic 'GGUF', found 'PK\\x03\\x04': not a GGUF file"},
      {gguf().magic("FUGG").file(), "is a big-endian GGUF file; nibble reads little-endian ones"},
      {gguf().version(0x03000000).file(),
       "is a big-endian GGUF file (version 3); nibble reads little-endian ones"},
      {gguf().magic("tjgg").file(), "is a GGML file from before GGUF (magic 'ggjt'); convert it to GGUF"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
       "is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"},
      {gguf().version(0).file(), "wanted GGUF version 2 or 3, found 0"},
      {gguf().version(1).file(), "wanted GGUF version 2 or 3, found 1; convert it with a newer gguf package"},
      {gguf().version(4).file(), "wanted GGUF version 2 or 3, found 4"},
      {gguf().version(~0U).file(), "wanted GGUF version 2 or 3, found 4294967295"},
      // Counts.
      {gguf().file().substr(0, 12),
       "truncated: file has 12 bytes, but the number of tensors of 8 bytes begins at "
       "byte 8"},
      {gguf().file().substr(0, 23),
       "truncated: file has 23 bytes, but the number of metadata entries of 8 bytes "
       "begins at byte 16"},
      {gguf().claim_tensors(kHuge).file() + std::string(136, '\0'),
       "claims 1152921504606846976 tensors of at least 33 header bytes each, but has only 136 bytes left"},
      {gguf().claim_entries(kHuge).file() + std::string(136, '\0'),
       "claims 1152921504606846976 metadata entries of at least 14 bytes each, but has only 136 bytes left"},
      {gguf().claim_entries(~uint64_t{0}).file(),
       "claims 18446744073709551615 metadata entries, beyond 63 bits"},
      {gguf().claim_tensors(uint64_t{1} << 63).file(), "claims 9223372036854775808 tensors, beyond 63 bits"},
      {gguf().claim_entries(2).u32("a", 1).file(),
       "claims 2 metadata entries of at least 14 bytes each, but has only 17 bytes left"},
      {gguf().claim_tensors(1).u32("a", 1).file(),
       "claims 1 tensors of at least 33 header bytes each, but has only 17 bytes left"},
      // Keys.
      {gguf().raw_key(string_bytes("abc", kHuge), kU32Type, number_bytes(1)).file(),
       "metadata entry 1 of 1: truncated: file has 43 bytes, but its key of 1152921504606846976 bytes begins "
       "at "
       "byte 32"},
      {gguf().raw_key(string_bytes("abc", ~uint64_t{0}), kU32Type, number_bytes(1)).file(),
       "metadata entry 1 of 1: truncated: file has 43 bytes, but its key of 18446744073709551615 bytes "
       "begins at "
       "byte 32"},
      {gguf().u32(std::string(65536, 'k'), 1).file(),
       "metadata entry 1 of 1: its key has 65536 bytes, more than the 65535 that nibble reads"},
      {gguf().u32("", 1).file(), "metadata entry 1 of 1: has an empty key"},
      {gguf().u32("a", 1).u32("b", 2).text("a", "x").file(), "metadata 'a': is there twice"},
      {gguf().u32("a\nb", 1).u32("a\nb", 1).file(), "metadata 'a\\x0ab': is there twice"},
      // Values.
      {gguf().raw("a", 13, "abcd").file(),
       "metadata 'a': the value's type is 13, which is no type of GGUF (0 to 12)"},
      {gguf().raw("a", ~0U, "abcd").file(),
       "metadata 'a': the value's type is 4294967295, which is no type of GGUF (0 to 12)"},
      {gguf().raw("abcdef", kU32Type, "abc").file().substr(0, 40),
       "metadata 'abcdef': truncated: file has 40 bytes, but the value's type of 4 bytes begins at byte 38"},
      {gguf().raw("a", kU32Type, "abc").file(),
       "metadata 'a': truncated: file has 40 bytes, but a u32 of 4 bytes begins at byte 37"},
      {gguf().raw("a", kBoolType, "\2").file(), "metadata 'a': wanted a bool of 0 or 1, found 2"},
      {gguf().raw("a", kStringType, string_bytes("abc", 4)).file(),
       "metadata 'a': truncated: file has 48 bytes, but a string of 4 bytes begins at byte 45"},
      {gguf().raw("a", kStringType, string_bytes("abc", kHuge)).file(),
       "metadata 'a': truncated: file has 48 bytes, but a string of 1152921504606846976 bytes begins at byte "
       "45"},
      {gguf().raw("a", kStringType, "abc").file(),
       "metadata 'a': truncated: file has 40 bytes, but a string of 8 bytes begins at byte 37"},
      // Arrays.
      {gguf().raw("a", kArrayType, array_of(kArrayType, 1, array_of(kU32Type, 1, "abcd"))).file(),
       "metadata 'a': an array of arrays is not implemented"},
      {gguf().raw("a", kArrayType, array_of(99, 1, "abcd")).file(),
       "metadata 'a': the array's type is 99, which is no type of GGUF (0 to 12)"},
      {gguf().raw("a", kArrayType, array_of(kU32Type, uint64_t{1} << 63, "abcd")).file(),
       "metadata 'a': an array claims 9223372036854775808 values of at least 4 bytes each, but the file has "
       "only 4 "
       "bytes left"},
      {gguf().raw("a", kArrayType, array_of(kStringType, uint64_t{1} << 61, "abcd")).file(),
       "metadata 'a': an array claims 2305843009213693952 values of at least 8 bytes each, but the file has "
       "only 4 "
       "bytes left"},
      {gguf().raw("a", kArrayType, array_of(kU32Type, 2, "abcdefg")).file(),
       "metadata 'a': an array claims 2 values of at least 4 bytes each, but the file has only 7 bytes left"},
      {gguf()
           .raw("a", kArrayType, array_of(kStringType, 2, string_bytes("a") + string_bytes("bc", 3)))
           .file(),
       "metadata 'a': truncated: file has 68 bytes, but a string of an array of 3 bytes begins at byte 66"},
      {gguf().raw("a", kArrayType, array_of(kBoolType, 3, std::string("\1\0\3", 3))).file(),
       "metadata 'a': wanted a bool of 0 or 1, found 3"},
      {gguf().raw("a", kArrayType, number_bytes(kU32Type).append("abcd")).file(),
       "metadata 'a': truncated: file has 45 bytes, but the array's length of 8 bytes begins at byte 41"},
      // Alignment.
      {gguf().u32("general.alignment", 0).file(),
       "metadata 'general.alignment': wanted an integer from 8 to 1048576, found the u32 0"},
      {gguf().u32("general.alignment", 3).file(),
       "metadata 'general.alignment': wanted an integer from 8 to 1048576, found the u32 3"},
      {gguf().u32("general.alignment", 33).file(),
       "metadata 'general.alignment': wanted a power of two, found the u32 33"},
      {gguf().u32("general.alignment", 1U << 31).file(),
       "metadata 'general.alignment': wanted an integer from 8 to 1048576, found the u32 2147483648"},
      {gguf().text("general.alignment", "32").file(),
       "metadata 'general.alignment': wanted an integer from 8 to 1048576, found the string '32'"},
      // Tensors: names and shapes.
      {gguf().raw_tensor(string_bytes("t", kHuge) + std::string(40, '\0')).file(),
       "tensor 1 of 1: truncated: file has 73 bytes, but its name of 1152921504606846976 bytes begins at "
       "byte 32"},
      {gguf().tensor(std::string(1025, 't'), {1}, kF32, "abcd").file(),
       "tensor 1 of 1: its name has 1025 bytes, more than the 1024 that nibble reads"},
      {gguf().tensor("", {1, 1}, kF32, "abcd").file(), "tensor 1 of 1: has an empty name"},
      {gguf()
           .tensor("t", {1}, kF32, "abcd")
           .tensor("u", {1}, kF32, "abcd")
           .tensor("t", {1}, kF32, "abcd")
           .file(),
       "tensor 't': is there twice"},
      {gguf().tensor("t", {}, kF32, "abcd").file(), "tensor 't': wanted 1 to 4 dims, found 0"},
      {gguf().tensor("t", {1, 1, 1, 1, 1}, kF32, "abcd").file(), "tensor 't': wanted 1 to 4 dims, found 5"},
      {gguf().raw_tensor(string_bytes("t") + number_bytes(~0U) + std::string(40, '\1')).file(),
       "tensor 't': wanted 1 to 4 dims, found 4294967295"},
      {gguf().tensor("t", {4, 0}, kF32, "").data("x").file(),
       "tensor 't': wanted dims from 1 to 2^63 - 1, found 0"},
      {gguf().tensor("t", {uint64_t{1} << 63}, kF32, "abcd").file(),
       "tensor 't': wanted dims from 1 to 2^63 - 1, found 9223372036854775808"},
      {gguf().tensor("t", {uint64_t{1} << 62}, kF32, "abcd").file(),
       "tensor 't': F32 [4611686018427387904] at offset 0: more bytes than 63 bits can count"},
      {gguf().tensor("t", {uint64_t{1} << 32, uint64_t{1} << 32}, kQ4_0, "abcd").file(),
       "tensor 't': Q4_0 [4294967296, 4294967296] at offset 0: more bytes than 63 bits can count"},
      {gguf()
           .tensor("t", {uint64_t{1} << 16, uint64_t{1} << 16, uint64_t{1} << 16, uint64_t{1} << 16}, kF32,
                   "ab")
           .file(),
       "tensor 't': F32 [65536, 65536, 65536, 65536] at offset 0: more bytes than 63 bits can count"},
      {gguf().tensor("t", {uint64_t{1} << 40, 1024}, kF32, "abcd").file(),
       "tensor 't': truncated: file has 100 bytes, but its 4503599627370496 bytes of data begin at byte 96 + "
       "0"},
      // Tensors: types and blocks.
      {gguf().tensor("t", {1}, 4, "abcd").file(), "tensor 't': its type is 4, which nibble does not know"},
      {gguf().tensor("t", {1}, ~0U, "abcd").file(),
       "tensor 't': its type is 4294967295, which nibble does not know"},
      {gguf().tensor("t", {33, 2}, kQ4_0, std::string(72, 'x')).file(),
       "tensor 't': Q4_0 [2, 33]: wanted rows of a multiple of 32 values, found 33"},
      {gguf().tensor("t", {128}, kQ4_K, std::string(144, 'x')).file(),
       "tensor 't': Q4_K [128]: wanted rows of a multiple of 256 values, found 128"},
      {gguf().tensor("t", {32, 2}, kNvfp4, std::string(36, 'x')).file(),
       "tensor 't': NVFP4 [2, 32]: wanted rows of a multiple of 64 values, found 32"},
      // Tensors: data.
      {gguf().tensor_at("t", {1}, kF32, 4).data("abcdefgh").file(),
       "tensor 't': wanted an offset that is a multiple of the alignment 32, found 4"},
      {gguf().u32("general.alignment", 64).tensor_at("t", {1}, kF32, 32).data(std::string(100, 'x')).file(),
       "tensor 't': wanted an offset that is a multiple of the alignment 64, found 32"},
      {gguf().tensor_at("t", {1}, kF32, 64).data("abcd").file(),
       "tensor 't': truncated: file has 68 bytes, but its 4 bytes of data begin at byte 64 + 64"},
      {gguf().tensor_at("t", {1}, kF32, 0).file(),
       "tensor 't': truncated: file has 57 bytes, but its 4 bytes of data begin at byte 64 + 0"},
      {gguf().tensor("t", {2}, kF32, "abcdefg").file(),
       "tensor 't': truncated: file has 71 bytes, but its 8 bytes of data begin at byte 64 + 0"},
      {gguf().tensor_at("t", {1}, kF32, (uint64_t{1} << 63) - 32).data("abcd").file(),
       "tensor 't': truncated: file has 68 bytes, but its 4 bytes of data begin at byte 64 + "
       "9223372036854775776"},
      {gguf().tensor_at("t", {1}, kF32, uint64_t{1} << 63).data("abcd").file(),
       "tensor 't': F32 [1] at offset 9223372036854775808: more bytes than 63 bits can count"},
      {gguf().tensor("t", {16}, kF32, std::string(64, 'x')).tensor_at("u", {1}, kF32, 32).file(),
       "tensor 'u': begins at byte 128, inside tensor 't', which ends at 160: an overlap"},
      {gguf().tensor("t", {1}, kF32, "abcd").tensor_at("u", {1}, kF32, 0).file(),
       "tensor 'u': begins at byte 96, inside tensor 't', which ends at 100: an overlap"},
      {gguf()
           .raw_tensor(string_bytes("t") + number_bytes(1U) + std::string(20, '\0'))
           .claim_tensors(2)
           .data(std::string(66, '\0'))
           .file(),
       "tensor 't': wanted dims from 1 to 2^63 - 1, found 0"},
      {gguf().claim_tensors(2).tensor("t", {1}, kF32, "").file() + std::string(40, '\0'),
       "tensor 2 of 2: has an empty name"},
      // Split.
      {gguf().raw("split.count", kU32Type, number_bytes(~0U)).file(),
       "metadata 'split.count': wanted an integer from 0 to 65535, found the u32 4294967295"},
      {gguf().text("split.count", "2").file(),
       "metadata 'split.count': wanted an integer from 0 to 65535, found the string '2'"},
      {gguf().u32("split.count", 2).file(),
       "metadata 'split.no': wanted an integer from 0 to 1, found nothing"},
      {gguf().split(0, 65535, 0).file(),
       "is part 1 of 65535 (split.no 0), so wanted a name that ends in '-00001-of-65535.gguf'"},
  };
  for (const auto& bad : cases) EXPECT_EQ(error_of(bad.file), bad.wanted);
  EXPECT_GE(std::size(cases), 40u);
}

// Every beginning of a good file is a bad file, and none is mistaken for a good one.
TEST(GgufErrors, TruncatedAnywhere) {
  const std::string file = gguf()
                               .text("general.architecture", "llama")
                               .u32("general.alignment", 16)
                               .texts("tokens", {"a", "bc", ""})
                               .array("scores", GgufValueType::kF32, 2, "abcdefgh")
                               .align(16)
                               .tensor("t", {2, 2}, kF32, std::string(16, 'x'))
                               .tensor("u", {32}, kQ4_0, std::string(18, 'x'))
                               .file();
  FaultyFileSystem whole;
  whole.add_file("m.gguf", file);
  ASSERT_TRUE(Gguf::open(whole, "m.gguf").ok());
  std::set<std::string> errors;
  for (size_t size = 0; size < file.size(); ++size) errors.insert(error_of(file.substr(0, size)));
  EXPECT_EQ(errors.count("no error"), 0u);
  EXPECT_GT(errors.size(), 20u);
}

// The file shrank after it was opened.
TEST(GgufErrors, ShrunkAnywhere) {
  const std::string file = gguf().text("a", "b").tensor("t", {1}, kF32, "abcd").file();
  for (int64_t size = 0; size < std::ssize(file); ++size) {
    FaultyFileSystem files;
    files.add_file("m.gguf", file);
    files.shrink("m.gguf", size);
    Status status = Gguf::open(files, "m.gguf").status();
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(status.message().starts_with("m.gguf: ")) << status.message();
  }
}

TEST(GgufErrors, FilesThatAreNotThere) {
  FaultyFileSystem files;
  EXPECT_EQ(Gguf::open(files, "m.gguf").status().message(), "m.gguf: cannot open: No such file or directory");
}

}  // namespace
}  // namespace nibble
