// tokenize_lines DIRECTORY|FILE.gguf [--no-parse-special] [--no-add-special] [--keep-special]: reads one JSON
// string a line on stdin and writes {"ids": [...], "decoded": "..."} a line, or {"error": "..."}. For
// tests/python/tokenizer_test.py and gguf_tokenizer_test.py.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/gguf.h"
#include "engine/gguf_tokenizer.h"
#include "text/tokenizer.h"

namespace {

nibble::Result<nibble::Tokenizer> load(const std::string& path) {
  const nibble::FileSystem& files = nibble::FileSystem::posix();
  if (!path.ends_with(".gguf")) return nibble::Tokenizer::load(files, path);
  NIBBLE_ASSIGN_OR_RETURN(const nibble::Gguf gguf, nibble::Gguf::open(files, path));
  return nibble::load_gguf_tokenizer(gguf.metadata());
}

}  // namespace

int main(int count, char** arguments) {
  nibble::EncodeOptions options;
  bool skip_special = true;
  std::string directory;
  for (int i = 1; i < count; ++i) {
    std::string argument = arguments[i];
    if (argument == "--no-parse-special") {
      options.parse_special = false;
    } else if (argument == "--no-add-special") {
      options.add_special = false;
    } else if (argument == "--keep-special") {
      skip_special = false;
    } else {
      directory = argument;
    }
  }
  auto tokenizer = load(directory);
  if (!tokenizer.ok()) {
    std::cerr << tokenizer.status().message() << "\n";
    return 1;
  }
  std::string line;
  while (std::getline(std::cin, line)) {
    auto ids = tokenizer->encode(nlohmann::json::parse(line).get<std::string>(), options);
    nlohmann::json answer;
    if (ids.ok()) {
      answer["ids"] = *ids;
      answer["decoded"] = tokenizer->decode(*ids, skip_special);
    } else {
      answer["error"] = ids.status().message();
    }
    std::cout << answer.dump() << "\n";
  }
  return 0;
}
