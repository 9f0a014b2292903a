#include "text/sentence_piece.h"

#include <algorithm>
#include <cmath>

#include "text/json_fields.h"
#include "text/utf8.h"

namespace nibble {
namespace {

constexpr std::string_view kSpaceMark = "\u2581";

// For a heap with the highest score on top and, of equal scores, the leftmost.
bool comes_later(const SentencePieceScratch::Candidate& a, const SentencePieceScratch::Candidate& b) {
  return a.score != b.score ? a.score < b.score : a.left > b.left;
}

// <0x0A> -> 10
std::optional<uint8_t> byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  int byte = 0;
  for (char c : token.substr(3, 2)) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit && (c < 'A' || c > 'F')) return std::nullopt;
    byte = 16 * byte + (is_digit ? c - '0' : c - 'A' + 10);
  }
  return static_cast<uint8_t>(byte);
}

}  // namespace

Result<SentencePiece> SentencePiece::create(const GgufVocabulary& vocabulary) {
  const auto where = [&](size_t id) { return fmt::format("{}: token {}", vocabulary.name, id); };
  if (vocabulary.scores.size() != vocabulary.tokens.size()) {
    return user_error("{}: wanted a score for each of {} tokens, found {}", vocabulary.name,
                      vocabulary.tokens.size(), vocabulary.scores.size());
  }
  SentencePiece model;
  model.tokens_ = vocabulary.tokens;
  model.types_ = vocabulary.types;
  model.scores_ = vocabulary.scores;
  model.byte_ids_.fill(-1);
  for (size_t i = 0; i < model.tokens_.size(); ++i) {
    const std::string& token = model.tokens_[i];
    const auto id = static_cast<int32_t>(i);
    if (std::isnan(model.scores_[i])) return user_error("{}: its score is NaN", where(i));
    if (model.type(id) == GgufTokenType::kByte) {
      const std::optional<uint8_t> byte = byte_of_token(token);
      if (!byte.has_value())
        return user_error("{}: wanted a byte token like <0x0A>, found {}", where(i), in_quotes(token));
      int32_t& place = model.byte_ids_[*byte];
      if (place >= 0) return user_error("{}: {} is also token {}", where(i), in_quotes(token), place);
      place = id;
    }
    if (token.empty()) continue;
    model.longest_bytes_ = std::max(model.longest_bytes_, token.size());
    const auto [at, is_new] = model.id_of_token_.emplace(token, id);
    if (!is_new) return user_error("{}: {} is also token {}", where(i), in_quotes(token), at->second);
  }
  model.unknown_id_ = vocabulary.unknown;
  return model;
}

std::optional<int32_t> SentencePiece::token_id(std::string_view token) const {
  auto found = id_of_token_.find(token);
  if (found == id_of_token_.end()) return std::nullopt;
  return found->second;
}

std::optional<int32_t> SentencePiece::made_id(std::string_view text) const {
  if (text.size() > longest_bytes_) return std::nullopt;
  const std::optional<int32_t> id = token_id(text);
  if (!id.has_value()) return std::nullopt;
  switch (type(*id)) {
    case GgufTokenType::kControl:
    case GgufTokenType::kUnknown:
    case GgufTokenType::kByte:
      return std::nullopt;
    default:
      return id;
  }
}

bool SentencePiece::add_candidate(std::string_view piece, int32_t left, SentencePieceScratch& scratch) const {
  const SentencePieceScratch::Symbol& symbol = scratch.symbols[static_cast<size_t>(left)];
  if (symbol.next == SentencePieceScratch::kNone) return false;
  const size_t left_size = symbol.size;
  const size_t size = left_size + scratch.symbols[static_cast<size_t>(symbol.next)].size;
  const std::optional<int32_t> id = made_id(piece.substr(symbol.begin, size));
  if (!id.has_value()) return false;
  if (type(*id) == GgufTokenType::kUnused) scratch.unused_left_sizes[*id] = left_size;
  scratch.heap.push_back({scores_[static_cast<size_t>(*id)], left, size});
  return true;
}

// Each merge takes one symbol away and adds at most two candidates, so that the heap sees at most 3n of them.
void SentencePiece::merge_symbols(std::string_view piece, SentencePieceScratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  heap.clear();
  for (size_t i = 0; i < symbols.size(); ++i) add_candidate(piece, static_cast<int32_t>(i), scratch);
  std::make_heap(heap.begin(), heap.end(), comes_later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    const SentencePieceScratch::Candidate top = heap.back();
    heap.pop_back();
    SentencePieceScratch::Symbol& left = symbols[static_cast<size_t>(top.left)];
    if (left.size == 0 || left.next == SentencePieceScratch::kNone) continue;
    SentencePieceScratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    // The neighbours may have changed since; the same place and size are the same text.
    if (left.size + right.size != top.size) continue;
    left.size = top.size;
    left.next = right.next;
    right.size = 0;
    if (right.next != SentencePieceScratch::kNone)
      symbols[static_cast<size_t>(right.next)].previous = top.left;
    if (left.previous != SentencePieceScratch::kNone && add_candidate(piece, left.previous, scratch))
      std::push_heap(heap.begin(), heap.end(), comes_later);
    if (add_candidate(piece, top.left, scratch)) std::push_heap(heap.begin(), heap.end(), comes_later);
  }
}

Status SentencePiece::append_bytes(std::string_view character, std::vector<int32_t>& ids) const {
  const auto id_of = [&](char c) { return byte_ids_[static_cast<unsigned char>(c)]; };
  if (std::all_of(character.begin(), character.end(), [&](char c) { return id_of(c) >= 0; })) {
    for (char c : character) ids.push_back(id_of(c));
    return {};
  }
  if (!unknown_id_.has_value()) {
    return user_error(
        "the character {} is in no token, and there is neither a byte token nor an unknown token",
        in_quotes(character));
  }
  ids.push_back(*unknown_id_);
  return {};
}

// The ids of a symbol: one token, or the parts of an unused one, or the bytes of a character.
Status SentencePiece::append_ids(std::string_view text, SentencePieceScratch& scratch,
                                 std::vector<int32_t>& ids) const {
  scratch.parts.assign(1, text);
  while (!scratch.parts.empty()) {
    const std::string_view part = scratch.parts.back();
    scratch.parts.pop_back();
    const std::optional<int32_t> id = made_id(part);
    if (id.has_value() && type(*id) != GgufTokenType::kUnused) {
      ids.push_back(*id);
      continue;
    }
    const auto unused =
        id.has_value() ? scratch.unused_left_sizes.find(*id) : scratch.unused_left_sizes.end();
    if (unused == scratch.unused_left_sizes.end()) {  // a character
      NIBBLE_RETURN_IF_ERROR(append_bytes(part, ids));
      continue;
    }
    scratch.parts.push_back(part.substr(unused->second));
    scratch.parts.push_back(part.substr(0, unused->second));
  }
  return {};
}

Status SentencePiece::encode(std::string_view piece, SentencePieceScratch& scratch,
                             std::vector<int32_t>& ids) const {
  auto& symbols = scratch.symbols;
  symbols.clear();
  scratch.unused_left_sizes.clear();
  for (size_t at = 0; at < piece.size();) {
    const size_t size = first_character(piece.substr(at)).size_bytes;
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back({at, size, index - 1, index + 1});
    at += size;
  }
  if (!symbols.empty()) symbols.back().next = SentencePieceScratch::kNone;
  merge_symbols(piece, scratch);
  for (const SentencePieceScratch::Symbol& symbol : symbols) {
    if (symbol.size != 0)
      NIBBLE_RETURN_IF_ERROR(append_ids(piece.substr(symbol.begin, symbol.size), scratch, ids));
  }
  return {};
}

std::string SentencePiece::bytes(int32_t id) const {
  const std::string& token = tokens_[static_cast<size_t>(id)];
  switch (type(id)) {
    case GgufTokenType::kByte:
      return std::string(1, static_cast<char>(*byte_of_token(token)));
    case GgufTokenType::kControl:
    case GgufTokenType::kUnknown:
    case GgufTokenType::kUserDefined:
      return token;
    default:
      break;
  }
  std::string text;
  size_t done = 0;
  for (size_t mark = 0; (mark = token.find(kSpaceMark, done)) != std::string::npos;
       done = mark + kSpaceMark.size()) {
    text.append(token, done, mark - done).append(" ");
  }
  return text.append(token, done);
}

}  // namespace nibble
