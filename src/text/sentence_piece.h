// SentencePiece's BPE: the pair of neighbours merges first whose token has the highest score. What is in no
// token becomes byte tokens. The `llama` model of GGUF.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "text/gguf_vocabulary.h"

namespace nibble {

// Working memory of one encode call, reused from piece to piece.
struct SentencePieceScratch {
  struct Symbol {
    size_t begin, size;      // in the piece; size 0: merged into its left neighbour
    int32_t previous, next;  // indices of neighbours, kNone at the ends
  };
  struct Candidate {
    float score;
    int32_t left;  // index of the left symbol
    size_t size;   // of the merged text
  };
  static constexpr int32_t kNone = -1;
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
  std::unordered_map<int32_t, size_t> unused_left_sizes;  // an unused token that was made -> its left part
  std::vector<std::string_view> parts;
};

// Immutable; safe for concurrent use. As in SentencePiece, text never makes a control, unknown or byte token
// by its spelling, and an unused token is taken apart again.
class SentencePiece {
 public:
  // Errors: no score for each token, a score that is NaN, a token twice, a byte token that is spelled
  // otherwise or twice. REQUIRES tokens of valid UTF-8, types as many as tokens or none.
  static Result<SentencePiece> create(const GgufVocabulary& vocabulary);

  SentencePiece(SentencePiece&&) = default;
  SentencePiece& operator=(SentencePiece&&) = default;
  SentencePiece(const SentencePiece&) = delete;  // id_of_token_ points into tokens_
  SentencePiece& operator=(const SentencePiece&) = delete;

  // Appends the ids of one piece, in which spaces are U+2581 already, in O(n log n). An error where a
  // character is in no token, there are no byte tokens for it, and there is no unknown token. REQUIRES valid
  // UTF-8 of less than 2^31 bytes.
  Status encode(std::string_view piece, SentencePieceScratch& scratch, std::vector<int32_t>& ids) const;

  std::optional<int32_t> token_id(std::string_view token) const;
  int32_t id_end() const { return static_cast<int32_t>(tokens_.size()); }
  // What a token decodes to. REQUIRES 0 <= id < id_end().
  std::string bytes(int32_t id) const;

 private:
  SentencePiece() = default;
  GgufTokenType type(int32_t id) const {
    return types_.empty() ? GgufTokenType::kNormal : types_[static_cast<size_t>(id)];
  }
  // The token that text can make.
  std::optional<int32_t> made_id(std::string_view text) const;
  // Puts the merge of a symbol and its right neighbour, where there is one, on the heap (unsorted).
  bool add_candidate(std::string_view piece, int32_t left, SentencePieceScratch& scratch) const;
  void merge_symbols(std::string_view piece, SentencePieceScratch& scratch) const;
  Status append_ids(std::string_view text, SentencePieceScratch& scratch, std::vector<int32_t>& ids) const;
  Status append_bytes(std::string_view character, std::vector<int32_t>& ids) const;

  std::vector<std::string> tokens_;
  std::vector<GgufTokenType> types_;
  std::vector<float> scores_;
  std::unordered_map<std::string_view, int32_t> id_of_token_;
  std::array<int32_t, 256> byte_ids_{};  // -1 for none
  std::optional<int32_t> unknown_id_;
  size_t longest_bytes_ = 0;
};

}  // namespace nibble
