#include "text/bpe.h"

#include <algorithm>

namespace nibble {
namespace {

// Ids index arrays, so they may exceed the number of tokens only so far: a file of a few bytes must not make
// us allocate gigabytes.
int64_t id_limit(size_t tokens) { return 2 * static_cast<int64_t>(tokens) + 65536; }

uint64_t pack(int32_t high, int32_t low) {
  return static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
}

// For a heap with the lowest rank on top and, of equal ranks, the leftmost.
bool comes_later(const BpeScratch::Candidate& a, const BpeScratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
}

}  // namespace

Result<Bpe> Bpe::parse(const JsonObject& model) {
  if (model.find("type") != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(std::string type, model.string("type"));
    if (type != "BPE")
      return user_error("{}: the model {} is not implemented (BPE is)", model.where("type"), in_quotes(type));
  }
  NIBBLE_RETURN_IF_ERROR(
      model.refuse_others({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                           "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.find(key) == nullptr) continue;
    NIBBLE_ASSIGN_OR_RETURN(std::string affix, model.string(key));
    if (!affix.empty())
      return user_error("{}: {} is not implemented (null and \"\" are)", model.where(key), in_quotes(affix));
  }
  if (const Json* dropout = model.find("dropout"); dropout != nullptr && *dropout != 0)
    return model.wrong("dropout", "null or 0 (dropout is for training)");
  NIBBLE_ASSIGN_OR_RETURN(bool byte_fallback, model.boolean("byte_fallback", false));
  if (byte_fallback) return user_error("{}: true is not implemented", model.where("byte_fallback"));

  Bpe bpe;
  NIBBLE_ASSIGN_OR_RETURN(bpe.fuse_unknown_, model.boolean("fuse_unk", false));
  NIBBLE_ASSIGN_OR_RETURN(bpe.ignore_merges_, model.boolean("ignore_merges", false));
  NIBBLE_RETURN_IF_ERROR(bpe.parse_vocab(model));
  NIBBLE_RETURN_IF_ERROR(bpe.parse_merges(model));
  if (model.find("unk_token") != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(std::string unknown, model.string("unk_token"));
    bpe.unknown_id_ = bpe.token_id(unknown);
    if (!bpe.unknown_id_.has_value())
      return user_error("{}: {} is not in the vocabulary", model.where("unk_token"), in_quotes(unknown));
  }
  return bpe;
}

Status Bpe::parse_vocab(const JsonObject& model) {
  const Json* vocab = model.find("vocab");
  if (vocab == nullptr || !vocab->is_object()) return model.wrong("vocab", "an object of tokens and ids");
  if (vocab->empty()) return user_error("{}: no tokens", model.where("vocab"));
  int64_t limit = id_limit(vocab->size());
  int32_t largest = 0;
  for (const auto& [token, value] : vocab->items()) {
    std::optional<int32_t> id = index_below(value, limit);
    if (!id.has_value()) {
      return user_error("{}[{}]: wanted an id from 0 to {} (for {} tokens), found {}", model.where("vocab"),
                        in_quotes(token), limit - 1, vocab->size(), describe(value));
    }
    largest = std::max(largest, *id);
  }
  token_of_id_.resize(static_cast<size_t>(largest) + 1);
  id_of_token_.reserve(vocab->size());
  low_character_ids_.fill(-1);
  for (const auto& [token, value] : vocab->items()) {
    auto id = value.get<int32_t>();
    std::optional<std::string>& place = token_of_id_[static_cast<size_t>(id)];
    if (place.has_value()) {
      return user_error("{}: the id {} belongs to {} and to {}", model.where("vocab"), id, in_quotes(*place),
                        in_quotes(token));
    }
    place = token;
    id_of_token_.emplace(*place, id);
    if (token.empty()) continue;
    Utf8Character character = first_character(token);
    if (character.size_bytes == token.size() && character.code < low_character_ids_.size())
      low_character_ids_[character.code] = id;
  }
  return {};
}

Status Bpe::parse_merges(const JsonObject& model) {
  NIBBLE_ASSIGN_OR_RETURN(const Json* merges, model.array("merges"));
  size_t rank = 0;
  for (size_t i = 0; i < merges->size(); ++i) {
    const Json& merge = (*merges)[i];
    auto where = [&] { return fmt::format("{}[{}]", model.where("merges"), i); };
    if (merge.is_string()) {
      const auto& line = merge.get_ref<const std::string&>();
      if (line.starts_with("#version")) continue;  // the head line of a merges.txt that was copied whole
      size_t space = line.find(' ');
      if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos) {
        return user_error("{}: wanted two tokens with one space between, found {}", where(), in_quotes(line));
      }
      NIBBLE_RETURN_IF_ERROR(add_merge(std::string_view(line).substr(0, space),
                                       std::string_view(line).substr(space + 1), rank, where()));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      NIBBLE_RETURN_IF_ERROR(add_merge(merge[0].get_ref<const std::string&>(),
                                       merge[1].get_ref<const std::string&>(), rank, where()));
    } else {
      return user_error("{}: wanted \"left right\" or [\"left\", \"right\"], found {}", where(),
                        describe(merge));
    }
    ++rank;
  }
  return {};
}

Status Bpe::add_merge(std::string_view left, std::string_view right, size_t rank, const std::string& where) {
  std::string merged = std::string(left) + std::string(right);
  std::optional<int32_t> ids[3];
  std::string_view tokens[3] = {left, right, merged};
  for (int i = 0; i < 3; ++i) {
    ids[i] = token_id(tokens[i]);
    if (!ids[i].has_value())
      return user_error("{}: the token {} is not in the vocabulary", where, in_quotes(tokens[i]));
  }
  merges_.insert_or_assign(pack(*ids[0], *ids[1]), pack(static_cast<int32_t>(rank), *ids[2]));
  return {};
}

std::optional<int32_t> Bpe::token_id(std::string_view token) const {
  auto found = id_of_token_.find(token);
  if (found == id_of_token_.end()) return std::nullopt;
  return found->second;
}

const std::string* Bpe::token(int32_t id) const {
  if (id < 0 || id >= id_end()) return nullptr;
  const std::optional<std::string>& token = token_of_id_[static_cast<size_t>(id)];
  return token.has_value() ? &*token : nullptr;
}

std::optional<int32_t> Bpe::character_id(Utf8Character character, std::string_view bytes) const {
  if (character.code >= low_character_ids_.size()) return token_id(bytes);
  int32_t id = low_character_ids_[character.code];
  if (id < 0) return std::nullopt;
  return id;
}

Status Bpe::split_symbols(std::string_view piece, BpeScratch& scratch) const {
  scratch.symbols.clear();
  auto add = [&](int32_t id) {
    auto index = static_cast<int32_t>(scratch.symbols.size());
    scratch.symbols.push_back({id, index - 1, index + 1, true});
  };
  bool after_unknown = false;
  while (!piece.empty()) {
    Utf8Character character = first_character(piece);
    std::string_view bytes = piece.substr(0, character.size_bytes);
    piece.remove_prefix(character.size_bytes);
    if (std::optional<int32_t> id = character_id(character, bytes); id.has_value()) {
      add(*id);
      after_unknown = false;
    } else if (unknown_id_.has_value()) {
      if (!after_unknown || !fuse_unknown_) add(*unknown_id_);
      after_unknown = true;
    } else {
      return user_error(
          "the character {} (U+{:04X}) is in no token of the vocabulary and there is no unk_token",
          in_quotes(bytes), static_cast<uint32_t>(character.code));
    }
  }
  if (!scratch.symbols.empty()) scratch.symbols.back().next = BpeScratch::kNone;
  return {};
}

bool Bpe::add_candidate(int32_t left, BpeScratch& scratch) const {
  const BpeScratch::Symbol& symbol = scratch.symbols[static_cast<size_t>(left)];
  if (symbol.next == BpeScratch::kNone) return false;
  const uint64_t* merge = merges_.find(pack(symbol.id, scratch.symbols[static_cast<size_t>(symbol.next)].id));
  if (merge == nullptr) return false;
  scratch.heap.push_back({static_cast<uint32_t>(*merge >> 32), left, static_cast<int32_t>(*merge)});
  return true;
}

// Each merge takes one symbol away and adds at most two candidates, so that the heap sees at most 3n of them.
void Bpe::merge_symbols(BpeScratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  heap.clear();
  for (size_t i = 0; i < symbols.size(); ++i) add_candidate(static_cast<int32_t>(i), scratch);
  std::make_heap(heap.begin(), heap.end(), comes_later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    BpeScratch::Candidate top = heap.back();
    heap.pop_back();
    BpeScratch::Symbol& left = symbols[static_cast<size_t>(top.left)];
    if (!left.alive || left.next == BpeScratch::kNone) continue;
    BpeScratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    // The neighbours may have changed since the candidate was made; what counts is that they still merge to
    // the same token, be it by another pair.
    const uint64_t* merge = merges_.find(pack(left.id, right.id));
    if (merge == nullptr || static_cast<int32_t>(*merge) != top.merged_id) continue;
    left.id = top.merged_id;
    left.next = right.next;
    right.alive = false;
    if (right.next != BpeScratch::kNone) symbols[static_cast<size_t>(right.next)].previous = top.left;
    if (left.previous != BpeScratch::kNone && add_candidate(left.previous, scratch))
      std::push_heap(heap.begin(), heap.end(), comes_later);
    if (add_candidate(top.left, scratch)) std::push_heap(heap.begin(), heap.end(), comes_later);
  }
}

Status Bpe::encode(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    if (std::optional<int32_t> id = token_id(piece); id.has_value()) {
      ids.push_back(*id);
      return {};
    }
  }
  NIBBLE_RETURN_IF_ERROR(split_symbols(piece, scratch));
  merge_symbols(scratch);
  for (const BpeScratch::Symbol& symbol : scratch.symbols) {
    if (symbol.alive) ids.push_back(symbol.id);
  }
  return {};
}

}  // namespace nibble
