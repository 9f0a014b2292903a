// A small tokenizer.json to vary: 256 byte symbols, some merges, one special token.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "text/byte_level.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace nibble {

// Ids: a byte is itself; 256.. are the merges' tokens in order; then <|end|>.
inline nlohmann::json small_tokenizer() {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string symbol;
    append_utf8(byte_to_character(static_cast<unsigned char>(byte)), symbol);
    vocab[symbol] = byte;
  }
  nlohmann::json merges = nlohmann::json::array();
  int id = 256;
  const char* pairs[][2] = {{"a", "b"}, {"ab", "c"}, {"\u0120", "a"}, {"b", "c"}, {"x", "x"}, {"xx", "xx"}};
  for (const auto& pair : pairs) {
    merges.push_back(std::string(pair[0]) + " " + pair[1]);
    vocab[std::string(pair[0]) + pair[1]] = id++;
  }
  nlohmann::json end = {{"id", id},        {"content", "<|end|>"}, {"single_word", false}, {"lstrip", false},
                        {"rstrip", false}, {"normalized", false},  {"special", true}};
  nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", {end}},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", merges}}}};
}

constexpr int32_t kAb = 256, kAbc = 257, kSpaceA = 258, kBc = 259, kXx = 260, kXxxx = 261, kEnd = 262;

}  // namespace nibble
