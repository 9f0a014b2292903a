#include "engine/gguf_tokenizer.h"

#include <gtest/gtest.h>

#include "base/faulty_file.h"
#include "checkpoint/gguf_header.h"
#include "checkpoint/write_gguf.h"
#include "checkpoint/write_safetensors.h"

namespace nibble {
namespace {

using Ids = std::vector<int32_t>;

GgufMetadata metadata_of(const GgufWriter& writer) {
  Result<GgufHeader> header = read_gguf_header(*memory_file("m.gguf", writer.file()));
  EXPECT_TRUE(header.ok()) << header.status().message();
  return std::move(header->metadata);
}

GgufWriter bpe_file() {
  return GgufWriter()
      .text("tokenizer.ggml.model", "gpt2")
      .text("tokenizer.ggml.pre", "qwen2")
      .texts("tokenizer.ggml.tokens", {"a", "b", "ab", "<|end|>"})
      .array("tokenizer.ggml.token_type", GgufValueType::kI32, 4, bytes_of<int32_t>({1, 1, 1, 3}))
      .texts("tokenizer.ggml.merges", {"a b"})
      .u32("tokenizer.ggml.eos_token_id", 3)
      .boolean("tokenizer.ggml.add_bos_token", false);
}

GgufWriter pieces_file() {
  return GgufWriter()
      .text("tokenizer.ggml.model", "llama")
      .texts("tokenizer.ggml.tokens", {"<unk>", "<s>", "</s>", "\u2581", "a"})
      .array("tokenizer.ggml.token_type", GgufValueType::kI32, 5, bytes_of<int32_t>({2, 3, 3, 1, 1}))
      .array("tokenizer.ggml.scores", GgufValueType::kF32, 5, bytes_of<float>({0, 0, 0, -1, -2}));
}

TEST(GgufTokenizerFile, ByteLevel) {
  const GgufMetadata metadata = metadata_of(bpe_file());
  Result<GgufVocabulary> vocabulary = read_gguf_vocabulary(metadata);
  ASSERT_TRUE(vocabulary.ok()) << vocabulary.status().message();
  EXPECT_EQ(vocabulary->name, "m.gguf");
  EXPECT_EQ(vocabulary->pre, "qwen2");
  EXPECT_EQ(vocabulary->types[3], GgufTokenType::kControl);
  EXPECT_EQ(vocabulary->eos, 3);
  EXPECT_FALSE(vocabulary->bos.has_value());
  EXPECT_EQ(vocabulary->add_bos, false);
  EXPECT_FALSE(vocabulary->add_eos.has_value());
  Result<Tokenizer> tokenizer = load_gguf_tokenizer(metadata);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(tokenizer->encode("abb<|end|>").value(), (Ids{2, 1, 3}));
}

TEST(GgufTokenizerFile, Pieces) {
  Result<Tokenizer> tokenizer = load_gguf_tokenizer(metadata_of(pieces_file()));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  // Ids that the file does not state: bos 1, unknown 0.
  EXPECT_EQ(tokenizer->encode("a?").value(), (Ids{1, 3, 4, 0}));
}

TEST(GgufTokenizerFile, BadKeys) {
  const struct {
    GgufWriter file;
    const char* wanted;
  } cases[] = {
      {GgufWriter(), "m.gguf: metadata 'tokenizer.ggml.model': wanted a string, found nothing"},
      {GgufWriter().text("tokenizer.ggml.model", "gpt2"),
       "m.gguf: metadata 'tokenizer.ggml.tokens': wanted an array of strings, found nothing"},
      {GgufWriter().text("tokenizer.ggml.model", "gpt2").texts("tokenizer.ggml.tokens", {"a"}),
       "m.gguf: metadata 'tokenizer.ggml.merges': wanted an array of strings, found nothing"},
      {GgufWriter().text("tokenizer.ggml.model", "llama").texts("tokenizer.ggml.tokens", {"a"}),
       "m.gguf: metadata 'tokenizer.ggml.scores': wanted an array of finite numbers, found nothing"},
      {GgufWriter()
           .text("tokenizer.ggml.model", "gpt2")
           .texts("tokenizer.ggml.tokens", {"a"})
           .array("tokenizer.ggml.token_type", GgufValueType::kI32, 1, bytes_of<int32_t>({7})),
       "m.gguf: metadata 'tokenizer.ggml.token_type': wanted an array, each an integer from 0 to 6, found "
       "the i32 7 "
       "at 0"},
      {bpe_file().text("tokenizer.ggml.bos_token_id", "x"),
       "m.gguf: metadata 'tokenizer.ggml.bos_token_id': wanted an integer from 0 to 2147483647, found the "
       "string "
       "'x'"},
      {bpe_file().u32("tokenizer.ggml.add_eos_token", 1),
       "m.gguf: metadata 'tokenizer.ggml.add_eos_token': wanted a bool, found the u32 1"},
      {bpe_file().boolean("tokenizer.ggml.add_sep_token", true),
       "m.gguf: metadata 'tokenizer.ggml.add_sep_token': wanted false (true is not implemented), found true"},
      {pieces_file().boolean("tokenizer.ggml.remove_extra_whitespaces", true),
       "m.gguf: metadata 'tokenizer.ggml.remove_extra_whitespaces': wanted false (true is not implemented), "
       "found "
       "true"},
      {bpe_file().u32("tokenizer.ggml.bos_token_id", 4),
       "m.gguf: tokenizer.ggml.bos_token_id: wanted an id from 0 to 3, found 4"},
  };
  for (const auto& bad : cases)
    EXPECT_EQ(load_gguf_tokenizer(metadata_of(bad.file)).status().message(), bad.wanted);
}

}  // namespace
}  // namespace nibble
