#include "text/json_fields.h"

#include <algorithm>

#include "base/json.h"
#include "text/utf8.h"

namespace nibble {
Result<Json> parse_tokenizer_json(std::string_view text, const std::string& name) {
  NIBBLE_RETURN_IF_ERROR(check_json_bounds(text, name));
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    return user_error("{}: not JSON, at byte {} of {}", name, error.byte, text.size());
  } catch (const Json::exception&) {
    return user_error("{}: not JSON: a number that is too large", name);
  }
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string out = "\"";
  std::string whole = repair_utf8(text.substr(0, kLongest));
  for (char c : whole) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  out += text.size() > kLongest ? "...\"" : "\"";
  return out;
}

std::string describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    case Json::value_t::string:
      return fmt::format("the string {}", in_quotes(value.get_ref<const std::string&>()));
    case Json::value_t::number_integer:
      return fmt::format("the number {}", value.get<int64_t>());
    case Json::value_t::number_unsigned:
      return fmt::format("the number {}", value.get<uint64_t>());
    case Json::value_t::number_float:
      return fmt::format("the number {}", value.get<double>());
    case Json::value_t::array:
      return "an array";
    default:
      return "an object";
  }
}

Result<JsonObject> JsonObject::from(const Json& value, std::string where) {
  if (!value.is_object()) return user_error("{}: wanted an object, found {}", where, describe(value));
  return JsonObject(&value, std::move(where), ".");
}

Result<JsonObject> JsonObject::of_file(const Json& value, std::string name) {
  if (!value.is_object()) return user_error("{}: wanted an object, found {}", name, describe(value));
  return JsonObject(&value, std::move(name), ": ");
}

std::string JsonObject::where(std::string_view key) const { return where_ + separator_ + std::string(key); }

const Json* JsonObject::find(std::string_view key) const {
  auto found = value_->find(key);
  return found == value_->end() || found->is_null() ? nullptr : &*found;
}

Status JsonObject::wrong(std::string_view key, std::string_view wanted) const {
  const Json* value = find(key);
  return user_error("{}: wanted {}, found {}", where(key), wanted,
                    value == nullptr ? "nothing" : describe(*value));
}

Status JsonObject::refuse_others(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : value_->items()) {
    if (!value.is_null() && std::find(known.begin(), known.end(), key) == known.end())
      return user_error("{}: the key {} is not implemented", where_, in_quotes(key));
  }
  return {};
}

Result<bool> JsonObject::boolean(std::string_view key, std::optional<bool> fallback) const {
  const Json* value = find(key);
  if (value == nullptr && fallback.has_value()) return *fallback;
  if (value == nullptr || !value->is_boolean()) return wrong(key, "true or false");
  return value->get<bool>();
}

Result<std::string> JsonObject::string(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr || !value->is_string()) return wrong(key, "a string");
  return value->get_ref<const std::string&>();
}

Result<const Json*> JsonObject::array(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr || !value->is_array()) return wrong(key, "an array");
  return value;
}

Result<JsonObject> JsonObject::object(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr || !value->is_object()) return wrong(key, "an object");
  return JsonObject(value, where(key), ".");
}

std::optional<int32_t> index_below(const Json& value, int64_t limit) {
  if (!value.is_number_integer()) return std::nullopt;
  if (!value.is_number_unsigned() && value.get<int64_t>() < 0) return std::nullopt;
  uint64_t index = value.get<uint64_t>();
  if (index >= static_cast<uint64_t>(limit) || index > INT32_MAX) return std::nullopt;
  return static_cast<int32_t>(index);
}

}  // namespace nibble
