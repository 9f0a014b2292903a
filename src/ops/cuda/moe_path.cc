#include "ops/cuda/moe_path.h"

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

namespace nibble::cuda {
namespace {

Result<std::map<std::string, int>> read_crossovers(const std::string& file, const std::string& device) {
  constexpr int64_t kMost = 1 << 20;  // bytes, and tokens
  std::map<std::string, int> found;
  if (!FileSystem::posix().exists(file)) return found;
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_text(FileSystem::posix(), file, kMost));
  NIBBLE_ASSIGN_OR_RETURN(const nlohmann::ordered_json json, parse_json(text, file));
  if (!json.is_object()) return user_error("{}: wanted an object", file);
  for (const auto& [key, value] : json.items()) {
    const int64_t tokens = value.is_number_integer() ? value.get<int64_t>() : -1;
    if (tokens < 0 || tokens > kMost)
      return user_error("{}: '{}': wanted 0 to {} tokens", file, key.substr(0, 100), kMost);
    if (key.starts_with(device + ": ")) found[key] = static_cast<int>(tokens);
  }
  return found;
}

}  // namespace

std::string crossover_key(const std::string& device, const MoeShape& s) {
  return fmt::format("{}: {}, {} of {} experts, {} x {}", device, tile_kind_name(s.kind), s.chosen, s.experts,
                     s.model, s.width);
}

MoeShape MoePaths::choose(MoeShape shape, int64_t chosen) const {
  shape.chosen = static_cast<int>(chosen);
  if (shape.kind == TileKind::kBF16) return with_many(shape);  // whatever a file of crossovers says
  if (path == "many") shape.most_few = 0;
  if (path != "auto" || !has_wgmma) return shape;
  shape = with_many(shape);
  if (crossovers.empty()) return shape;
  const auto found = crossovers.find(crossover_key(device, shape));
  if (found != crossovers.end()) shape.most_few = found->second;
  return shape;
}

Result<MoePaths> make_moe_paths(const Device& device, bool has_wgmma, const CudaOptions& options) {
  MoePaths paths{options.moe_path, has_wgmma, device.name};
  const bool is_off = options.tensor_cores == "off";
  if (is_off && (paths.path == "few" || paths.path == "many"))
    return user_error("moe-path {}: tensor cores are off (for moe-arith w4a4, too); take auto", paths.path);
  if (is_off) paths.path = "portable";
  if (paths.path == "many" && !has_wgmma)
    return user_error("moe-path many: no wgmma in this build for {}; take auto", device.name);
  if (paths.path != "auto") return paths;
  auto crossovers = read_crossovers(options.moe_paths_file, device.name);
  if (!crossovers.ok()) log_warning("{}; not used", crossovers.status().message());
  if (crossovers.ok()) paths.crossovers = std::move(crossovers).value();
  return paths;
}

}  // namespace nibble::cuda
