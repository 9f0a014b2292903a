// config.json (and generation_config.json), read so that nothing in it is passed over in silence: every key
// is read with its range or its implemented values, known to be harmless, or reported as unread.
//
// The first error sticks: a reader goes on returning defaults, and status() tells at the end. That keeps the
// family files free of a check after every line.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"

namespace nibble {

class Config {
 public:
  // DIRECTORY/FILE.
  static Result<Config> load(const FileSystem& files, const std::string& directory,
                             const std::string& file = "config.json");
  // `name` stands for the file in messages.
  static Result<Config> parse(std::string_view text, const std::string& name);
  // A config that was made of something else: `shown` says what its keys (dotted paths) are called there, for
  // messages. REQUIRES an object.
  static Config of(nlohmann::ordered_json object, const std::string& name,
                   std::map<std::string, std::string> shown);

  // A key that is absent or null is "not there".
  bool has(const std::string& key) const;
  // It is there, as null.
  bool is_null(const std::string& key) const;

  // Values in [low, high]; without a default the key must be there.
  int64_t integer(const std::string& key, int64_t low, int64_t high, std::optional<int64_t> otherwise = {});
  double number(const std::string& key, double low, double high, std::optional<double> otherwise = {});
  bool boolean(const std::string& key, std::optional<bool> otherwise = {});
  std::string text(const std::string& key, std::optional<std::string> otherwise = {});
  // A list of exactly `count` entries.
  std::vector<int64_t> integers(const std::string& key, int64_t count, int64_t low, int64_t high);
  std::vector<std::string> texts(const std::string& key, int64_t count);
  // One integer or a list of up to 64 (eos_token_id); empty where it is not there.
  std::vector<int64_t> integer_or_list(const std::string& key, int64_t low, int64_t high);
  // The object under a key; its errors and its unread keys are this reader's too.
  Config object(const std::string& key);

  // For switches: where the key is there, its value must be one of these (JSON values), else it is refused as
  // not implemented, with key, value and what is implemented.
  void only(const std::string& key, std::initializer_list<nlohmann::ordered_json> implemented);
  bool equals(const std::string& key, const nlohmann::ordered_json& value);
  // Keys that cannot change the result (training, bookkeeping).
  void ignore(std::initializer_list<const char*> keys);
  // The same of all keys of this object that are left.
  void ignore_rest();

  // An error of the family's own, in the same form.
  void fail(const std::string& message);
  // `key = value` for messages.
  std::string describe(const std::string& key) const;

  const std::string& name() const { return shared_->name; }
  // All of it, whatever was read.
  const nlohmann::ordered_json& json() const { return shared_->root; }
  const Status& status() const { return shared_->status; }
  // Keys that nobody read, dotted, in the file's order; also those of objects that were read. What is null or
  // false asks for nothing and is left out.
  std::vector<std::string> unread() const;

 private:
  struct Shared {
    std::string name;
    nlohmann::ordered_json root;
    Status status;
    std::set<std::string> read;                // dotted paths
    std::map<std::string, std::string> shown;  // dotted path -> its name in messages, where it has another
  };
  const nlohmann::ordered_json* find(const std::string& key, bool required);
  std::string path(const std::string& key) const { return prefix_ + key; }
  std::string shown(const std::string& key) const;
  template <class T>
  T checked_range(const std::string& key, T value, T low, T high);

  std::shared_ptr<Shared> shared_;
  const nlohmann::ordered_json* object_ = nullptr;  // in shared_->root
  std::string prefix_;                              // "" or "rope_parameters."
};

}  // namespace nibble
