// Byte pair encoding: the `model` part of tokenizer.json.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "text/flat_map.h"
#include "text/json_fields.h"
#include "text/utf8.h"

namespace nibble {

// Working memory of one encode call, reused from piece to piece.
struct BpeScratch {
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // indices of neighbours, kNone at the ends
    bool alive;
  };
  struct Candidate {
    uint32_t rank;
    int32_t left;  // index of the left symbol
    int32_t merged_id;
  };
  static constexpr int32_t kNone = -1;
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

// Immutable after parsing; safe for concurrent use.
class Bpe {
 public:
  static Result<Bpe> parse(const JsonObject& model);

  Bpe(Bpe&&) = default;
  Bpe& operator=(Bpe&&) = default;
  Bpe(const Bpe&) = delete;  // id_of_token_ points into token_of_id_
  Bpe& operator=(const Bpe&) = delete;

  // Appends the ids of one piece in O(n log n). An error where a character is in no token and there is no
  // unk_token. REQUIRES valid UTF-8 of less than 2^31 bytes.
  Status encode(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const;

  std::optional<int32_t> token_id(std::string_view token) const;
  // Null where no token has the id.
  const std::string* token(int32_t id) const;
  int32_t token_count() const { return static_cast<int32_t>(id_of_token_.size()); }
  // One more than the largest id.
  int32_t id_end() const { return static_cast<int32_t>(token_of_id_.size()); }

 private:
  Bpe() = default;
  Status parse_vocab(const JsonObject& model);
  Status parse_merges(const JsonObject& model);
  Status add_merge(std::string_view left, std::string_view right, size_t rank, const std::string& where);
  Status split_symbols(std::string_view piece, BpeScratch& scratch) const;
  void merge_symbols(BpeScratch& scratch) const;
  // Puts the merge of a symbol and its right neighbour, where there is one, on the heap (unsorted).
  bool add_candidate(int32_t left, BpeScratch& scratch) const;
  std::optional<int32_t> character_id(Utf8Character character, std::string_view bytes) const;

  std::vector<std::optional<std::string>> token_of_id_;
  std::unordered_map<std::string_view, int32_t> id_of_token_;
  FlatMap merges_;  // left id and right id -> rank and merged id
  // The tokens of one character below U+0200, which covers the byte-level alphabet; -1 for none.
  std::array<int32_t, 0x200> low_character_ids_{};
  std::optional<int32_t> unknown_id_;
  bool fuse_unknown_ = false;
  bool ignore_merges_ = false;
};

}  // namespace nibble
