// What a Tokenizer is made of, for the files that make one: tokenizer.cc and gguf_tokenizer.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/post_processor.h"
#include "text/pre_tokenizer.h"
#include "text/regex.h"
#include "text/sentence_piece.h"
#include "text/tokenizer.h"

namespace nibble {

struct Tokenizer::Impl {
  struct ModelScratch {
    BpeScratch bpe;
    SentencePieceScratch sentence_piece;
  };

  std::variant<Bpe, SentencePiece> model;
  AddedTokens added;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  PostProcessor post_processor = {};
  Decoding decoding = Decoding::kSpaced;
  bool strips_first_space = false;  // of a decoded text: the one that the normalizer put there
  // By id: what decoding gives, nothing where no token has the id.
  std::vector<std::optional<std::string>> bytes_of_id = {};
  std::vector<bool> special = {};

  // Fills bytes_of_id and special from the rest.
  void index_tokens();
  Status encode_text(std::string text, RegexScratch& regex_scratch, ModelScratch& model_scratch,
                     std::vector<int32_t>& ids) const;
};

}  // namespace nibble
