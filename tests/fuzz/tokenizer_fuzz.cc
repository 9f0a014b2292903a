// Arbitrary bytes as a tokenizer.json, then text from the same bytes through it. The input is the file, a
// byte 0, and the text; without a byte 0 the file is the text, too.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "base/log.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  nibble::set_log_level(nibble::LogLevel::kError);
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  size_t end = bytes.find('\0');
  std::string_view file = bytes.substr(0, end);
  std::string_view text = end == std::string_view::npos ? bytes : bytes.substr(end + 1);

  nibble::Utf8Stream stream;
  std::string shown = stream.push(text.substr(0, text.size() / 2));
  shown += stream.push(text.substr(text.size() / 2));
  shown += stream.finish();
  if (shown != nibble::repair_utf8(text)) std::abort();

  auto tokenizer = nibble::Tokenizer::parse(file, "fuzz");
  if (!tokenizer.ok()) {
    if (tokenizer.status().message().find('\n') != std::string::npos) std::abort();
    return 0;
  }
  for (bool parse_special : {true, false}) {
    auto ids = tokenizer->encode(text, {.parse_special = parse_special, .add_special = true});
    if (!ids.ok()) continue;
    for (int32_t id : *ids) {
      if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
    }
    std::string decoded = tokenizer->decode(*ids, parse_special);
    if (decoded != nibble::repair_utf8(decoded)) std::abort();
  }
  return 0;
}
