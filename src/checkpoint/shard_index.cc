#include "checkpoint/shard_index.h"

#include <algorithm>
#include <utility>

#include "checkpoint/json_reader.h"
#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

constexpr int64_t kMaxIndexBytes = 100'000'000;

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name.find("..") == std::string::npos &&
         std::none_of(name.begin(), name.end(), [](char c) {
           return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
         });
}

class IndexReader final : public JsonReader {
 public:
  std::map<std::string, std::string> weight_map;
  bool saw_weight_map = false;

 private:
  bool start_object(size_t) override {
    if (depth_ == 1 && key_ == "weight_map") {
      if (saw_weight_map) return fail(user_error("'weight_map' is there twice"));
      saw_weight_map = in_weight_map_ = true;
    } else if (in_weight_map_) {
      return unexpected("an object");
    }
    ++depth_;
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ == 1) in_weight_map_ = false;
    return true;
  }

  bool start_array(size_t) override {
    if (!unexpected("an array")) return false;
    ++depth_;
    return true;
  }

  bool end_array() override {
    --depth_;
    return true;
  }

  bool key(std::string& key) override {
    if (depth_ == 1 || in_weight_map_) key_ = std::move(key);
    return true;
  }

  bool string(std::string& text) override {
    if (!in_weight_map_) return unexpected("a string");
    if (!is_plain_name(text)) {
      return fail(user_error("tensor {}: shard {} is not the plain name of a file in this directory",
                             quoted_name(key_), quoted_name(text)));
    }
    if (!weight_map.emplace(key_, std::move(text)).second)
      return fail(user_error("tensor {}: is in 'weight_map' twice", quoted_name(key_)));
    return true;
  }

  // Everything is welcome outside weight_map, and skipped.
  bool unexpected(std::string_view what) override {
    if (in_weight_map_)
      return fail(user_error("tensor {}: wanted the name of a shard, found {}", quoted_name(key_), what));
    if (depth_ == 0) return fail(user_error("wanted an object, found {}", what));
    if (depth_ == 1 && key_ == "weight_map")
      return fail(user_error("'weight_map': wanted an object, found {}", what));
    return true;
  }

  int64_t depth_ = 0;
  bool in_weight_map_ = false;
  std::string key_;
};

}  // namespace

Result<std::map<std::string, std::string>> read_shard_index(const FileSystem& files,
                                                            const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_text(files, path, kMaxIndexBytes));
  IndexReader reader;
  NIBBLE_RETURN_IF_ERROR(reader.read(text).with_context(path));
  if (!reader.saw_weight_map) return user_error("{}: 'weight_map' is missing", path);
  return std::move(reader.weight_map);
}

}  // namespace nibble
