// The metadata of a GGUF file: keys and values of twelve types, and arrays of all but arrays.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace nibble {

enum class GgufValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// "u8", "string" ...; empty for a number that is no type.
std::string_view gguf_value_type_name(GgufValueType type);
// Bytes of one value in the file; 0 for strings and arrays, whose length the file says.
int64_t gguf_value_bytes(GgufValueType type);

// A value as its bytes in the file, so that no value takes more memory than it takes there.
struct GgufValue {
  GgufValueType type = GgufValueType::kU8;  // of the elements, where it is an array; never kArray
  bool is_array = false;
  int64_t count = 1;
  // Little-endian numbers. A string by itself is its characters; in an array each string has a u64 length in
  // front. Checked when read: the sizes fit, a bool is 0 or 1.
  std::string raw;
};

// For people: `the u32 4`, `the string 'llama'`, `an array of 3 strings`.
std::string describe(const GgufValue& value);

// Errors name the file, the key, what was wanted and what is there. Any integer type will do where an integer
// is wanted, and any number where a number is. Immutable after reading; safe for concurrent use.
class GgufMetadata {
 public:
  // `name` stands for the file in messages.
  explicit GgufMetadata(std::string name) : name_(std::move(name)) {}

  // False where the key is there already.
  bool add(std::string key, GgufValue&& value);

  bool has(std::string_view key) const { return values_.find(key) != values_.end(); }
  const GgufValue* find(std::string_view key) const;  // null where it is not there
  // By key.
  const std::map<std::string, GgufValue, std::less<>>& values() const { return values_; }
  const std::string& name() const { return name_; }

  // Without `otherwise` the key must be there.
  Result<int64_t> integer(std::string_view key, int64_t low, int64_t high,
                          std::optional<int64_t> otherwise = {}) const;
  // NaN and infinity are refused.
  Result<double> number(std::string_view key, std::optional<double> otherwise = {}) const;
  Result<bool> boolean(std::string_view key, std::optional<bool> otherwise = {}) const;
  Result<std::string> text(std::string_view key, std::optional<std::string> otherwise = {}) const;

  // Arrays. A key that is not there is an error.
  Result<std::vector<int64_t>> integers(std::string_view key, int64_t low, int64_t high) const;
  Result<std::vector<double>> numbers(std::string_view key) const;
  Result<std::vector<bool>> booleans(std::string_view key) const;
  Result<std::vector<std::string>> texts(std::string_view key) const;
  // One integer for each of `count` layers: an array of that length, or an integer that counts for all.
  Result<std::vector<int64_t>> integer_each(std::string_view key, int64_t count, int64_t low,
                                            int64_t high) const;

  // `FILE: metadata 'KEY': wanted WANTED, found ...`
  Status wrong(std::string_view key, const std::string& wanted) const;

 private:
  Result<const GgufValue*> array(std::string_view key, const std::string& wanted) const;

  std::string name_;
  std::map<std::string, GgufValue, std::less<>> values_;
};

}  // namespace nibble
