#include "text/tokenizer.h"

#include <algorithm>
#include <utility>

#include "text/byte_level.h"
#include "text/json_fields.h"
#include "text/tokenizer_impl.h"
#include "text/utf8.h"

namespace nibble {
namespace {

constexpr int64_t kMaxFileBytes = INT64_C(256) << 20;
constexpr size_t kMaxTextBytes = size_t{64} << 20;  // of one encode call; positions in BPE are 32 bits

}  // namespace

void Tokenizer::Impl::index_tokens() {
  int32_t end = std::visit([](const auto& any) { return any.id_end(); }, model);
  for (const AddedToken& token : added.tokens()) end = std::max(end, token.id + 1);
  bytes_of_id.resize(static_cast<size_t>(end));
  special.resize(static_cast<size_t>(end));
  auto bytes_of = [&](const std::string& token) {
    return decoding == Decoding::kByteLevel ? byte_level_to_bytes(token) : token;
  };
  if (const auto* bpe = std::get_if<Bpe>(&model)) {
    for (int32_t id = 0; id < bpe->id_end(); ++id) {
      if (const std::string* token = bpe->token(id); token != nullptr)
        bytes_of_id[static_cast<size_t>(id)] = bytes_of(*token);
    }
  } else {
    const auto& pieces = std::get<SentencePiece>(model);
    for (int32_t id = 0; id < pieces.id_end(); ++id) bytes_of_id[static_cast<size_t>(id)] = pieces.bytes(id);
  }
  for (const AddedToken& token : added.tokens()) {
    bytes_of_id[static_cast<size_t>(token.id)] = bytes_of(token.content);
    special[static_cast<size_t>(token.id)] = token.special;
  }
}

// Text with no added token that is looked for in raw text.
Status Tokenizer::Impl::encode_text(std::string text, RegexScratch& regex_scratch,
                                    ModelScratch& model_scratch, std::vector<int32_t>& ids) const {
  Pieces pieces{std::move(text), {}};
  pieces.ranges.push_back({0, pieces.text.size()});
  NIBBLE_RETURN_IF_ERROR(pre_tokenizer.apply(pieces, regex_scratch));
  std::string_view all = pieces.text;
  for (const TextRange& piece : pieces.ranges) {
    const std::string_view part = all.substr(piece.begin, piece.end - piece.begin);
    if (const auto* bpe = std::get_if<Bpe>(&model)) {
      NIBBLE_RETURN_IF_ERROR(bpe->encode(part, model_scratch.bpe, ids));
    } else {
      NIBBLE_RETURN_IF_ERROR(std::get<SentencePiece>(model).encode(part, model_scratch.sentence_piece, ids));
    }
  }
  return {};
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::load(const FileSystem& files, const std::string& directory) {
  std::string path = join_path(directory, "tokenizer.json");
  NIBBLE_ASSIGN_OR_RETURN(std::string text, read_text(files, path, kMaxFileBytes));
  return parse(text, path);
}

Result<Tokenizer> Tokenizer::parse(std::string_view tokenizer_json, const std::string& name) {
  NIBBLE_ASSIGN_OR_RETURN(Json json, parse_tokenizer_json(tokenizer_json, name));
  NIBBLE_ASSIGN_OR_RETURN(JsonObject file, JsonObject::of_file(json, name));
  // Truncation and padding are for training batches; a caller's limits are its own.
  NIBBLE_RETURN_IF_ERROR(file.refuse_others({"version", "truncation", "padding", "added_tokens", "normalizer",
                                             "pre_tokenizer", "post_processor", "decoder", "model"}));
  if (const Json* version = file.find("version"); version != nullptr && *version != "1.0")
    return file.wrong("version", "\"1.0\"");
  NIBBLE_ASSIGN_OR_RETURN(JsonObject model, file.object("model"));
  NIBBLE_ASSIGN_OR_RETURN(Bpe bpe, Bpe::parse(model));
  NIBBLE_ASSIGN_OR_RETURN(Normalizer normalizer,
                          Normalizer::parse(file.find("normalizer"), file.where("normalizer")));
  NIBBLE_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer,
                          PreTokenizer::parse(file.find("pre_tokenizer"), file.where("pre_tokenizer")));
  NIBBLE_ASSIGN_OR_RETURN(AddedTokens added, AddedTokens::parse(file, bpe, normalizer));
  NIBBLE_ASSIGN_OR_RETURN(Decoding decoding, parse_decoder(file.find("decoder"), file.where("decoder")));
  auto impl = std::make_unique<Impl>(Impl{.model = std::move(bpe),
                                          .added = std::move(added),
                                          .normalizer = std::move(normalizer),
                                          .pre_tokenizer = std::move(pre_tokenizer),
                                          .decoding = decoding});
  impl->index_tokens();
  NIBBLE_ASSIGN_OR_RETURN(impl->post_processor,
                          PostProcessor::parse(file.find("post_processor"), file.where("post_processor"),
                                               static_cast<int32_t>(impl->bytes_of_id.size())));
  return Tokenizer(std::move(impl));
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  if (text.size() > kMaxTextBytes)
    return user_error("a text of {} bytes, more than the {} that can be encoded", text.size(), kMaxTextBytes);
  std::string whole = repair_utf8(text);
  std::vector<int32_t> ids;
  if (options.add_special) ids = impl_->post_processor.before;
  RegexScratch regex_scratch(whole.size());
  Impl::ModelScratch model_scratch;
  std::vector<Segment> segments, inner;
  impl_->added.split(whole, /*is_normalized=*/false, options.parse_special, segments);
  for (const Segment& segment : segments) {
    if (segment.id.has_value()) {
      ids.push_back(*segment.id);
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(
        std::string normalized,
        impl_->normalizer.apply(whole.substr(segment.range.begin, segment.range.end - segment.range.begin)));
    inner.clear();
    impl_->added.split(normalized, /*is_normalized=*/true, options.parse_special, inner);
    for (const Segment& part : inner) {
      if (part.id.has_value()) {
        ids.push_back(*part.id);
        continue;
      }
      NIBBLE_RETURN_IF_ERROR(
          impl_->encode_text(normalized.substr(part.range.begin, part.range.end - part.range.begin),
                             regex_scratch, model_scratch, ids));
    }
  }
  if (options.add_special) {
    const std::vector<int32_t>& after = impl_->post_processor.after;
    ids.insert(ids.end(), after.begin(), after.end());
  }
  return ids;
}

std::string Tokenizer::decode_bytes(std::span<const int32_t> ids, bool skip_special) const {
  std::string out;
  bool is_first = true;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) continue;
    const std::optional<std::string>& bytes = impl_->bytes_of_id[static_cast<size_t>(id)];
    if (!bytes.has_value() || (skip_special && is_special(id))) continue;
    if (impl_->decoding == Decoding::kSpaced && !is_first) out += ' ';
    out += *bytes;
    is_first = false;
  }
  return out;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes = decode_bytes(ids, skip_special);
  if (impl_->strips_first_space && bytes.starts_with(' ')) bytes.erase(0, 1);
  return repair_utf8(bytes);
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->bytes_of_id.size()); }

std::optional<int32_t> Tokenizer::token_id(std::string_view token) const {
  std::optional<int32_t> id = impl_->added.token_id(token);
  if (id.has_value()) return id;
  return std::visit([&](const auto& model) { return model.token_id(token); }, impl_->model);
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->special[static_cast<size_t>(id)];
}

}  // namespace nibble
