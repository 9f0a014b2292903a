// What a path may name, and what a GGUF file brings beside its weights.
#include "engine/model_source.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/faulty_file.h"
#include "checkpoint/write_gguf.h"

namespace nibble {
namespace {

GgufWriter small_model() {
  GgufWriter writer;
  return writer.text("general.architecture", "llama")
      .u32("llama.block_count", 1)
      .u32("llama.context_length", 64)
      .u32("llama.embedding_length", 8)
      .u32("llama.feed_forward_length", 16)
      .u32("llama.attention.head_count", 2)
      .u32("llama.attention.head_count_kv", 1)
      .f32("llama.attention.layer_norm_rms_epsilon", 1e-5f)
      .text("tokenizer.ggml.model", "gpt2")
      .text("tokenizer.ggml.pre", "gpt-2")
      .texts("tokenizer.ggml.tokens", {"a", "b", "ab", "<s>", "</s>", "<eot>"})
      .array("tokenizer.ggml.token_type", GgufValueType::kU32, 6,
             number_bytes(1u) + number_bytes(1u) + number_bytes(1u) + number_bytes(3u) + number_bytes(3u) +
                 number_bytes(3u))
      .texts("tokenizer.ggml.merges", {"a b"})
      .u32("tokenizer.ggml.bos_token_id", 3)
      .u32("tokenizer.ggml.eos_token_id", 4)
      .u32("tokenizer.ggml.eot_token_id", 5)
      .text("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}");
}

std::string error_of(const FileSystem& files, const std::string& path) {
  return ModelSource::open(files, path).status().message();
}

TEST(ModelSource, GgufBringsItsTextParts) {
  FaultyFileSystem files;
  files.add_file("m/model.gguf", small_model().f32("general.sampling.temp", 0.25f).file());
  files.add_file("own.jinja", "own: {{ messages[0].content }}");
  for (const char* path : {"m/model.gguf", "m"}) {
    auto source = ModelSource::open(files, path);
    ASSERT_TRUE(source.ok()) << source.status().message();
    auto spec = (*source)->spec();
    ASSERT_TRUE(spec.ok()) << spec.status().message();
    EXPECT_EQ(spec->family, "llama");
    EXPECT_EQ(spec->vocab, 6);  // from the tokens
    EXPECT_EQ(spec->eos, (std::vector<int32_t>{4, 5}));
    EXPECT_TRUE(spec->tied_head);
    auto tokenizer = (*source)->tokenizer();
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    EXPECT_EQ(tokenizer->encode("ab", {.add_special = false}).value(), (std::vector<int32_t>{2}));
    auto chat = (*source)->chat();
    ASSERT_TRUE(chat.ok()) << chat.status().message();
    const nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "hi"}}};
    EXPECT_EQ(chat->render(messages, true).value(), "<s>hi</s>");
    EXPECT_EQ((*source)->chat("own.jinja").value().render(messages, true).value(), "own: hi");
    EXPECT_EQ((*source)->generation(6).value().sampling.temperature, 0.25f);
    EXPECT_EQ((*source)->generation(6).value().sampling.top_k, SamplingParams().top_k);
  }
}

TEST(ModelSource, BrokenTextPartsAreNamed) {
  FaultyFileSystem files;
  files.add_file("temp.gguf", small_model().f32("general.sampling.temp", -1).file());
  EXPECT_EQ(ModelSource::open(files, "temp.gguf").value()->generation(6).status().message(),
            "temp.gguf: metadata 'general.sampling.temp': wanted a value in [0, 100], found the f32 -1");
  GgufWriter no_template;
  files.add_file("none.gguf", no_template.text("general.architecture", "llama").file());
  auto chat = ModelSource::open(files, "none.gguf").value()->chat();
  ASSERT_TRUE(chat.ok());
  EXPECT_FALSE(chat->has_template());
  EXPECT_EQ(chat->render(nlohmann::ordered_json::array(), true).status().message().find("none.gguf: "), 0u);
  GgufWriter far_bos;
  far_bos.texts("tokenizer.ggml.tokens", {"a"}).u32("tokenizer.ggml.bos_token_id", 1);
  files.add_file("bos.gguf", far_bos.file());
  EXPECT_NE(ModelSource::open(files, "bos.gguf")
                .value()
                ->chat()
                .status()
                .message()
                .find("'tokenizer.ggml.bos_token_id'"),
            std::string::npos);
}

TEST(ModelSource, WhichFileADirectoryStandsFor) {
  FaultyFileSystem files;
  files.add_file("two/a.gguf", small_model().file());
  files.add_file("two/b.gguf", small_model().file());
  EXPECT_EQ(error_of(files, "two"), "two: holds several models: a.gguf, b.gguf; name one of them");
  EXPECT_EQ(error_of(files, "two/b.gguf"), "");

  files.add_file("parts/m-00001-of-00002.gguf", small_model().split(0, 2, 1).file());
  files.add_file("parts/m-00002-of-00002.gguf",
                 GgufWriter().split(1, 2, 1).tensor("t", {1}, 0, "abcd").file());
  EXPECT_EQ(error_of(files, "parts"), "");
  EXPECT_NE(error_of(files, "parts/m-00002-of-00002.gguf").find("open the first part"), std::string::npos);

  // config.json wins, as in a repository that has both.
  files.add_file("both/config.json", "{}");
  files.add_file("both/a.gguf", "no gguf");
  EXPECT_NE(ModelSource::open(files, "both").value()->spec().status().message().find("config.json: "),
            std::string::npos);

  EXPECT_NE(error_of(files, "nowhere").find("model 'nowhere': no such file or directory"), std::string::npos);
  files.add_file("text.gguf", "hello");
  EXPECT_NE(error_of(files, "text.gguf").find("text.gguf: "), std::string::npos);
}

}  // namespace
}  // namespace nibble
