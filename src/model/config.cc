#include "model/config.h"

#include <fmt/ranges.h>

#include <cmath>
#include <utility>

#include "base/json.h"

namespace nibble {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;
constexpr int64_t kMaxEosTokens = 64;

std::string short_dump(const nlohmann::ordered_json& value) {
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.size() <= 80 ? text : text.substr(0, 77) + "...";
}

}  // namespace

Result<Config> Config::load(const FileSystem& files, const std::string& directory, const std::string& file) {
  std::string path = join_path(directory, file);
  NIBBLE_ASSIGN_OR_RETURN(std::string text, read_text(files, path, kMaxConfigBytes));
  return parse(text, path);
}

Result<Config> Config::parse(std::string_view text, const std::string& name) {
  NIBBLE_ASSIGN_OR_RETURN(nlohmann::ordered_json root, parse_json(text, name));
  if (!root.is_object()) return user_error("{}: wanted a JSON object", name);
  return of(std::move(root), name, {});
}

Config Config::of(nlohmann::ordered_json object, const std::string& name,
                  std::map<std::string, std::string> shown) {
  NIBBLE_CHECK(object.is_object());
  Config config;
  config.shared_ = std::make_shared<Shared>();
  config.shared_->name = name;
  config.shared_->root = std::move(object);
  config.shared_->shown = std::move(shown);
  config.object_ = &config.shared_->root;
  return config;
}

std::string Config::shown(const std::string& key) const {
  const std::string at = path(key);
  const auto found = shared_->shown.find(at);
  return found == shared_->shown.end() ? at : found->second;
}

bool Config::has(const std::string& key) const {
  auto found = object_->find(key);
  return found != object_->end() && !found->is_null();
}

bool Config::is_null(const std::string& key) const {
  auto found = object_->find(key);
  return found != object_->end() && found->is_null();
}

const nlohmann::ordered_json* Config::find(const std::string& key, bool required) {
  shared_->read.insert(path(key));
  if (has(key)) return &*object_->find(key);
  if (required) fail(fmt::format("key '{}' is missing", shown(key)));
  return nullptr;
}

void Config::fail(const std::string& message) {
  if (shared_->status.ok()) shared_->status = user_error("{}: {}", shared_->name, message);
}

std::string Config::describe(const std::string& key) const {
  return fmt::format("'{}' = {}", shown(key), has(key) ? short_dump((*object_)[key]) : "null");
}

template <class T>
T Config::checked_range(const std::string& key, T value, T low, T high) {
  if (value >= low && value <= high) return value;  // false for NaN
  fail(fmt::format("key {}: wanted a value in [{}, {}]", describe(key), low, high));
  return low;
}

int64_t Config::integer(const std::string& key, int64_t low, int64_t high, std::optional<int64_t> otherwise) {
  const nlohmann::ordered_json* value = find(key, !otherwise);
  if (value == nullptr) return otherwise.value_or(low);
  // An unsigned value above INT64_MAX would wrap in get<int64_t>.
  if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX)) {
    fail(fmt::format("key {}: wanted an integer in [{}, {}]", describe(key), low, high));
    return low;
  }
  return checked_range(key, value->get<int64_t>(), low, high);
}

double Config::number(const std::string& key, double low, double high, std::optional<double> otherwise) {
  const nlohmann::ordered_json* value = find(key, !otherwise);
  if (value == nullptr) return otherwise.value_or(low);
  if (!value->is_number()) {
    fail(fmt::format("key {}: wanted a number in [{}, {}]", describe(key), low, high));
    return low;
  }
  return checked_range(key, value->get<double>(), low, high);
}

bool Config::boolean(const std::string& key, std::optional<bool> otherwise) {
  const nlohmann::ordered_json* value = find(key, !otherwise);
  if (value == nullptr) return otherwise.value_or(false);
  if (!value->is_boolean()) {
    fail(fmt::format("key {}: wanted true or false", describe(key)));
    return false;
  }
  return value->get<bool>();
}

std::string Config::text(const std::string& key, std::optional<std::string> otherwise) {
  const nlohmann::ordered_json* value = find(key, !otherwise);
  if (value == nullptr) return std::move(otherwise).value_or("");
  if (!value->is_string()) {
    fail(fmt::format("key {}: wanted a string", describe(key)));
    return "";
  }
  return value->get<std::string>();
}

std::vector<int64_t> Config::integers(const std::string& key, int64_t count, int64_t low, int64_t high) {
  const nlohmann::ordered_json* value = find(key, true);
  std::vector<int64_t> list(static_cast<size_t>(count), low);
  if (value == nullptr) return list;
  if (!value->is_array() || static_cast<int64_t>(value->size()) != count) {
    fail(fmt::format("key '{}': wanted a list of {} integers, found {}", shown(key), count,
                     short_dump(*value)));
    return list;
  }
  for (size_t i = 0; i < list.size(); ++i) {
    const nlohmann::ordered_json& entry = (*value)[i];
    if (!entry.is_number_integer() || (entry.is_number_unsigned() && entry.get<uint64_t>() > INT64_MAX) ||
        entry.get<int64_t>() < low || entry.get<int64_t>() > high) {
      fail(fmt::format("key '{}', entry {}: wanted an integer in [{}, {}], found {}", shown(key), i, low,
                       high, short_dump(entry)));
      return list;
    }
    list[i] = entry.get<int64_t>();
  }
  return list;
}

std::vector<std::string> Config::texts(const std::string& key, int64_t count) {
  const nlohmann::ordered_json* value = find(key, true);
  std::vector<std::string> list(static_cast<size_t>(count));
  if (value == nullptr) return list;
  if (!value->is_array() || static_cast<int64_t>(value->size()) != count) {
    fail(fmt::format("key '{}': wanted a list of {} strings, found {}", shown(key), count,
                     short_dump(*value)));
    return list;
  }
  for (size_t i = 0; i < list.size(); ++i) {
    if (!(*value)[i].is_string()) {
      fail(fmt::format("key '{}', entry {}: wanted a string, found {}", shown(key), i,
                       short_dump((*value)[i])));
      return list;
    }
    list[i] = (*value)[i].get<std::string>();
  }
  return list;
}

std::vector<int64_t> Config::integer_or_list(const std::string& key, int64_t low, int64_t high) {
  if (!has(key)) {
    shared_->read.insert(path(key));
    return {};
  }
  const nlohmann::ordered_json& value = (*object_)[key];
  if (!value.is_array()) return {integer(key, low, high)};
  if (static_cast<int64_t>(value.size()) > kMaxEosTokens) {
    fail(fmt::format("key '{}': wanted at most {} entries, found {}", shown(key), kMaxEosTokens,
                     value.size()));
    return {};
  }
  return integers(key, static_cast<int64_t>(value.size()), low, high);
}

Config Config::object(const std::string& key) {
  static const nlohmann::ordered_json empty = nlohmann::ordered_json::object();
  Config inner = *this;
  inner.prefix_ = path(key) + ".";
  inner.object_ = &empty;
  if (const nlohmann::ordered_json* value = find(key, true)) {
    if (value->is_object()) {
      inner.object_ = value;
    } else {
      fail(fmt::format("key {}: wanted an object", describe(key)));
    }
  }
  return inner;
}

void Config::only(const std::string& key, std::initializer_list<nlohmann::ordered_json> implemented) {
  const nlohmann::ordered_json* value = find(key, false);
  if (value == nullptr) return;
  std::vector<std::string> names;
  for (const nlohmann::ordered_json& allowed : implemented) {
    if (*value == allowed) return;
    names.push_back(short_dump(allowed));
  }
  if (names.empty()) names.push_back("null");
  fail(fmt::format("key {} is not implemented; implemented: {}", describe(key), fmt::join(names, ", ")));
}

bool Config::equals(const std::string& key, const nlohmann::ordered_json& value) {
  const nlohmann::ordered_json* found = find(key, false);
  return found != nullptr && *found == value;
}

void Config::ignore(std::initializer_list<const char*> keys) {
  for (const char* key : keys) shared_->read.insert(path(key));
}

void Config::ignore_rest() {
  for (const auto& [key, value] : object_->items()) shared_->read.insert(path(key));
}

std::vector<std::string> Config::unread() const {
  std::vector<std::string> names;
  for (const auto& [key, value] : object_->items()) {
    std::string here = path(key);
    if (value.is_null() || value == false) continue;  // a switch that is off
    if (shared_->read.count(here) == 0) {
      names.push_back(shown(key));
      continue;
    }
    if (!value.is_object()) continue;
    // Only objects that somebody looked into have unread keys worth naming.
    auto inside = shared_->read.lower_bound(here + ".");
    if (inside == shared_->read.end() || inside->rfind(here + ".", 0) != 0) continue;
    Config inner = *this;
    inner.prefix_ = here + ".";
    inner.object_ = &value;
    for (std::string& name : inner.unread()) names.push_back(std::move(name));
  }
  return names;
}

}  // namespace nibble
