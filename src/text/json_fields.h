// Reading untrusted JSON: parsing within bounds, and fields by key and type with errors that say where, what
// was wanted and what is there.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

using Json = nlohmann::json;

// Bounds that keep a small file from becoming gigabytes of tree.

// `name` stands for the file in messages. Of a key that is there twice the last counts.
Result<Json> parse_tokenizer_json(std::string_view text, const std::string& name);

// A string for a message: in quotes, one line, cut where it is long.
std::string in_quotes(std::string_view text);
// What a value is, for a message: `the number 3`, `the string "abc"`, `an array`.
std::string describe(const Json& value);

// A view of a JSON object at a place in a file. The value must outlive it.
class JsonObject {
 public:
  // The object that a file is; `name` stands for the file in messages.
  static Result<JsonObject> of_file(const Json& value, std::string name);
  // An object within a file; `where` is its place for messages: `tokenizer.json: added_tokens[3]`.
  static Result<JsonObject> from(const Json& value, std::string where);

  const std::string& where() const { return where_; }
  // `tokenizer.json: model.vocab`
  std::string where(std::string_view key) const;

  // Null where the key is absent or its value is null.
  const Json* find(std::string_view key) const;
  // `path: wanted ..., found ...`
  Status wrong(std::string_view key, std::string_view wanted) const;
  // An error for the first key that is not known and not null.
  Status refuse_others(std::initializer_list<std::string_view> known) const;

  // The value; an error where it is of another type, or absent without a fallback.
  Result<bool> boolean(std::string_view key, std::optional<bool> fallback = {}) const;
  Result<std::string> string(std::string_view key) const;
  Result<const Json*> array(std::string_view key) const;
  Result<JsonObject> object(std::string_view key) const;

 private:
  JsonObject(const Json* value, std::string where, const char* separator)
      : value_(value), where_(std::move(where)), separator_(separator) {}

  const Json* value_;
  std::string where_;
  const char* separator_;  // between where_ and a key: ": " after a file's name, else "."
};

// The integer that `value` is where it is one in [0, limit).
std::optional<int32_t> index_below(const Json& value, int64_t limit);

}  // namespace nibble
