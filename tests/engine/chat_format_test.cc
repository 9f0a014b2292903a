#include "engine/chat_format.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/faulty_file.h"

namespace nibble {
namespace {

const nlohmann::ordered_json kMessages = {{{"role", "user"}, {"content", "hi"}}};

Result<std::string> render(const FaultyFileSystem& files, const std::string& override_path = "") {
  NIBBLE_ASSIGN_OR_RETURN(ChatFormat format, ChatFormat::load(files, "m", override_path));
  return format.render(kMessages, true);
}

TEST(ChatFormat, WhereTheTemplateComesFrom) {
  FaultyFileSystem files;
  files.add_file("m/config.json", "{}");
  EXPECT_NE(render(files).status().message().find("no chat template"), std::string::npos);

  files.add_file("m/tokenizer_config.json", R"({"chat_template": "inline {{ messages[0].content }}"})");
  EXPECT_EQ(render(files).value(), "inline hi");
  files.add_file(
      "m/tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]})");
  EXPECT_EQ(render(files).value(), "listed");
  files.add_file("m/chat_template.jinja", "file");
  EXPECT_EQ(render(files).value(), "file");
  files.add_file("mine.jinja", "mine {{ add_generation_prompt }}");
  EXPECT_EQ(render(files, "mine.jinja").value(), "mine True");
  EXPECT_NE(render(files, "none.jinja").status().message().find("none.jinja"), std::string::npos);
}

TEST(ChatFormat, SpecialTokensAreVariables) {
  FaultyFileSystem files;
  files.add_file(
      "m/tokenizer_config.json",
      R"({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "unk_token": null})");
  files.add_file("m/chat_template.jinja",
                 "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token is defined }}");
  EXPECT_EQ(render(files).value(), "<s>hi</s>False");
}

TEST(ChatFormat, BrokenFilesAreNamed) {
  FaultyFileSystem files;
  files.add_file("m/tokenizer_config.json", "{");
  EXPECT_NE(render(files).status().message().find("m/tokenizer_config.json"), std::string::npos);
  files.add_file("m/tokenizer_config.json", "[]");
  EXPECT_NE(render(files).status().message().find("m/tokenizer_config.json"), std::string::npos);
  files.add_file("m/tokenizer_config.json", R"({"chat_template": "{% if %}"})");
  EXPECT_NE(render(files).status().message().find("m/tokenizer_config.json"), std::string::npos);
}

}  // namespace
}  // namespace nibble
