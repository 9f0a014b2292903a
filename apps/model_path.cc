#include "model_path.h"

#include <cstdlib>

#include "base/file.h"
#include "model/synthetic_model.h"

namespace nibble {
namespace {

std::string cache_directory() {
  if (const char* home = std::getenv("HF_HOME"); home != nullptr && *home != '\0')
    return join_path(home, "hub");
  const char* home = std::getenv("HOME");
  return join_path(home != nullptr ? home : "", ".cache/huggingface/hub");
}

}  // namespace

std::string moe_paths_file() {
  if (const char* file = std::getenv("NIBBLE_MOE_PATHS")) return file;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0')
    return join_path(cache, "nibble/moe_paths.json");
  const char* home = std::getenv("HOME");
  return home != nullptr ? join_path(home, ".cache/nibble/moe_paths.json") : "";
}

Result<std::string> find_model(const std::string& name) {
  const FileSystem& files = FileSystem::posix();
  if (is_synthetic(name) || files.is_directory(name)) return name;
  if (files.exists(name) && name.ends_with(".gguf")) return name;
  if (files.exists(name))
    return user_error("model '{}': is a file; give the directory that holds it, or a .gguf file", name);
  std::string folder = "models--";
  for (char c : name) folder += c == '/' ? std::string("--") : std::string(1, c);
  const std::string cached = join_path(cache_directory(), folder);
  constexpr int64_t kMaxRefBytes = 4096;
  if (!name.empty() && files.is_directory(cached)) {
    NIBBLE_ASSIGN_OR_RETURN(std::string commit,
                            read_text(files, join_path(cached, "refs/main"), kMaxRefBytes));
    while (!commit.empty() && commit.back() == '\n') commit.pop_back();
    const std::string snapshot = join_path(join_path(cached, "snapshots"), commit);
    if (files.is_directory(snapshot)) return snapshot;
    return user_error("model '{}': {} is not there; download it again", name, snapshot);
  }
  return user_error(
      "model '{}': no such directory, nor in the cache at {}; give a directory with config.json, "
      "tokenizer.json and *.safetensors, or a .gguf file",
      name, cache_directory());
}

}  // namespace nibble
