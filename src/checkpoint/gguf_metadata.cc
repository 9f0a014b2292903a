#include "checkpoint/gguf_metadata.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

// Numbers in the file are little-endian, as the machines are that nibble runs on.
template <class T>
T load(const GgufValue& value, int64_t i) {
  T number;
  std::memcpy(&number, value.raw.data() + static_cast<size_t>(i) * sizeof(T), sizeof(T));
  return number;
}

// Element i as an integer; nothing where it is none, or beyond 63 bits.
std::optional<int64_t> integer_at(const GgufValue& value, int64_t i) {
  switch (value.type) {
    case GgufValueType::kU8:
      return load<uint8_t>(value, i);
    case GgufValueType::kI8:
      return load<int8_t>(value, i);
    case GgufValueType::kU16:
      return load<uint16_t>(value, i);
    case GgufValueType::kI16:
      return load<int16_t>(value, i);
    case GgufValueType::kU32:
      return load<uint32_t>(value, i);
    case GgufValueType::kI32:
      return load<int32_t>(value, i);
    case GgufValueType::kI64:
      return load<int64_t>(value, i);
    case GgufValueType::kU64: {
      const auto number = load<uint64_t>(value, i);
      if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
      return static_cast<int64_t>(number);
    }
    default:
      return std::nullopt;
  }
}

std::optional<double> number_at(const GgufValue& value, int64_t i) {
  if (value.type == GgufValueType::kF32) return load<float>(value, i);
  if (value.type == GgufValueType::kF64) return load<double>(value, i);
  if (value.type == GgufValueType::kU64) return static_cast<double>(load<uint64_t>(value, i));
  if (std::optional<int64_t> integer = integer_at(value, i); integer.has_value())
    return static_cast<double>(*integer);
  return std::nullopt;
}

// REQUIRES a string or an array of strings.
std::string describe_text(const GgufValue& value) { return "the string " + quoted_name(value.raw); }

std::string describe_element(const GgufValue& value, int64_t i) {
  const std::string_view type = gguf_value_type_name(value.type);
  if (value.type == GgufValueType::kString) return describe_text(value);
  if (value.type == GgufValueType::kBool) return load<uint8_t>(value, i) != 0 ? "true" : "false";
  if (value.type == GgufValueType::kU64) return fmt::format("the {} {}", type, load<uint64_t>(value, i));
  if (std::optional<int64_t> integer = integer_at(value, i); integer.has_value())
    return fmt::format("the {} {}", type, *integer);
  return fmt::format("the {} {}", type, number_at(value, i).value_or(0));
}

std::string range_text(int64_t low, int64_t high) {
  if (high == std::numeric_limits<int64_t>::max()) return fmt::format("an integer of at least {}", low);
  return fmt::format("an integer from {} to {}", low, high);
}

}  // namespace

std::string_view gguf_value_type_name(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8:
      return "u8";
    case GgufValueType::kI8:
      return "i8";
    case GgufValueType::kU16:
      return "u16";
    case GgufValueType::kI16:
      return "i16";
    case GgufValueType::kU32:
      return "u32";
    case GgufValueType::kI32:
      return "i32";
    case GgufValueType::kF32:
      return "f32";
    case GgufValueType::kBool:
      return "bool";
    case GgufValueType::kString:
      return "string";
    case GgufValueType::kArray:
      return "array";
    case GgufValueType::kU64:
      return "u64";
    case GgufValueType::kI64:
      return "i64";
    case GgufValueType::kF64:
      return "f64";
  }
  return "";
}

int64_t gguf_value_bytes(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8:
    case GgufValueType::kI8:
    case GgufValueType::kBool:
      return 1;
    case GgufValueType::kU16:
    case GgufValueType::kI16:
      return 2;
    case GgufValueType::kU32:
    case GgufValueType::kI32:
    case GgufValueType::kF32:
      return 4;
    case GgufValueType::kU64:
    case GgufValueType::kI64:
    case GgufValueType::kF64:
      return 8;
    case GgufValueType::kString:
    case GgufValueType::kArray:
      return 0;
  }
  return 0;
}

std::string describe(const GgufValue& value) {
  if (!value.is_array) return describe_element(value, 0);
  return fmt::format("an array of {} {}{}", value.count, gguf_value_type_name(value.type),
                     value.type == GgufValueType::kString && value.count != 1 ? "s" : "");
}

bool GgufMetadata::add(std::string key, GgufValue&& value) {
  return values_.try_emplace(std::move(key), std::move(value)).second;
}

const GgufValue* GgufMetadata::find(std::string_view key) const {
  auto at = values_.find(key);
  return at == values_.end() ? nullptr : &at->second;
}

Status GgufMetadata::wrong(std::string_view key, const std::string& wanted) const {
  const GgufValue* value = find(key);
  return user_error("{}: metadata {}: wanted {}, found {}", name_, quoted_name(key), wanted,
                    value == nullptr ? "nothing" : describe(*value));
}

Result<int64_t> GgufMetadata::integer(std::string_view key, int64_t low, int64_t high,
                                      std::optional<int64_t> otherwise) const {
  const GgufValue* value = find(key);
  if (value == nullptr && otherwise.has_value()) return *otherwise;
  if (value == nullptr || value->is_array) return wrong(key, range_text(low, high));
  const std::optional<int64_t> integer = integer_at(*value, 0);
  if (!integer.has_value() || *integer < low || *integer > high) return wrong(key, range_text(low, high));
  return *integer;
}

Result<double> GgufMetadata::number(std::string_view key, std::optional<double> otherwise) const {
  const GgufValue* value = find(key);
  if (value == nullptr && otherwise.has_value()) return *otherwise;
  if (value == nullptr || value->is_array) return wrong(key, "a finite number");
  const std::optional<double> number = number_at(*value, 0);
  if (!number.has_value() || !std::isfinite(*number)) return wrong(key, "a finite number");
  return *number;
}

Result<bool> GgufMetadata::boolean(std::string_view key, std::optional<bool> otherwise) const {
  const GgufValue* value = find(key);
  if (value == nullptr && otherwise.has_value()) return *otherwise;
  if (value == nullptr || value->is_array || value->type != GgufValueType::kBool) return wrong(key, "a bool");
  return load<uint8_t>(*value, 0) != 0;
}

Result<std::string> GgufMetadata::text(std::string_view key, std::optional<std::string> otherwise) const {
  const GgufValue* value = find(key);
  if (value == nullptr && otherwise.has_value()) return *std::move(otherwise);
  if (value == nullptr || value->is_array || value->type != GgufValueType::kString)
    return wrong(key, "a string");
  return value->raw;
}

Result<const GgufValue*> GgufMetadata::array(std::string_view key, const std::string& wanted) const {
  const GgufValue* value = find(key);
  if (value == nullptr || !value->is_array) return wrong(key, wanted);
  return value;
}

Result<std::vector<int64_t>> GgufMetadata::integers(std::string_view key, int64_t low, int64_t high) const {
  const std::string wanted = "an array, each " + range_text(low, high);
  NIBBLE_ASSIGN_OR_RETURN(const GgufValue* value, array(key, wanted));
  std::vector<int64_t> integers;
  if (value->type == GgufValueType::kString || value->type == GgufValueType::kBool) return wrong(key, wanted);
  integers.reserve(static_cast<size_t>(value->count));
  for (int64_t i = 0; i < value->count; ++i) {
    const std::optional<int64_t> integer = integer_at(*value, i);
    if (!integer.has_value() || *integer < low || *integer > high) {
      return user_error("{}: metadata {}: wanted {}, found {} at {}", name_, quoted_name(key), wanted,
                        describe_element(*value, i), i);
    }
    integers.push_back(*integer);
  }
  return integers;
}

Result<std::vector<double>> GgufMetadata::numbers(std::string_view key) const {
  const std::string wanted = "an array of finite numbers";
  NIBBLE_ASSIGN_OR_RETURN(const GgufValue* value, array(key, wanted));
  if (value->type == GgufValueType::kString || value->type == GgufValueType::kBool) return wrong(key, wanted);
  std::vector<double> numbers;
  numbers.reserve(static_cast<size_t>(value->count));
  for (int64_t i = 0; i < value->count; ++i) {
    const std::optional<double> number = number_at(*value, i);
    if (!number.has_value() || !std::isfinite(*number)) {
      return user_error("{}: metadata {}: wanted {}, found {} at {}", name_, quoted_name(key), wanted,
                        describe_element(*value, i), i);
    }
    numbers.push_back(*number);
  }
  return numbers;
}

Result<std::vector<bool>> GgufMetadata::booleans(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const GgufValue* value, array(key, "an array of bool"));
  if (value->type != GgufValueType::kBool) return wrong(key, "an array of bool");
  std::vector<bool> booleans;
  for (int64_t i = 0; i < value->count; ++i) booleans.push_back(load<uint8_t>(*value, i) != 0);
  return booleans;
}

Result<std::vector<std::string>> GgufMetadata::texts(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const GgufValue* value, array(key, "an array of strings"));
  if (value->type != GgufValueType::kString) return wrong(key, "an array of strings");
  std::vector<std::string> texts;
  texts.reserve(static_cast<size_t>(value->count));
  size_t at = 0;
  for (int64_t i = 0; i < value->count; ++i) {
    uint64_t size = 0;
    std::memcpy(&size, value->raw.data() + at, sizeof(size));
    texts.push_back(value->raw.substr(at + sizeof(size), size));
    at += sizeof(size) + size;
  }
  return texts;
}

Result<std::vector<int64_t>> GgufMetadata::integer_each(std::string_view key, int64_t count, int64_t low,
                                                        int64_t high) const {
  const GgufValue* value = find(key);
  if (value == nullptr || !value->is_array) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t integer, this->integer(key, low, high));
    return std::vector<int64_t>(static_cast<size_t>(count), integer);
  }
  if (value->count != count) return wrong(key, fmt::format("an integer or an array of {}", count));
  return integers(key, low, high);
}

}  // namespace nibble
