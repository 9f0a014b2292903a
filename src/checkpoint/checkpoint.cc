#include "checkpoint/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <set>

#include "base/numbers.h"
#include "checkpoint/shard_index.h"
#include "quant/float_codes.h"

namespace nibble {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

// "found only 'pytorch_model.bin'": other weight files in the directory, for the message that ours are
// missing.
std::string other_weights(const FileSystem& files, const std::string& directory) {
  constexpr size_t kMentioned = 3;
  Result<std::vector<std::string>> names = files.list(directory);
  std::vector<std::string> found;
  if (names.ok()) {
    for (const std::string& name : *names) {
      for (const char* ending : {".safetensors", ".gguf", ".bin", ".pt", ".pth"}) {
        if (name.ends_with(ending) && found.size() < kMentioned) found.push_back(quoted_name(name));
      }
    }
  }
  return found.empty() ? "found no weights" : fmt::format("found only {}", fmt::join(found, ", "));
}

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

size_t common_suffix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin());
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const FileSystem& files, const std::string& directory) {
  if (!files.exists(directory)) return user_error("{}: no such directory", directory);
  if (!files.is_directory(directory)) {
    return user_error("{}: not a directory; wanted a model directory with {} or {}", directory, kSingleFile,
                      kIndexFile);
  }
  Checkpoint checkpoint;
  checkpoint.directory_ = directory;
  const std::string index_path = join_path(directory, kIndexFile);
  if (files.exists(join_path(directory, kSingleFile))) {
    NIBBLE_RETURN_IF_ERROR(checkpoint.add_file(files, kSingleFile));
  } else if (files.exists(index_path)) {
    NIBBLE_RETURN_IF_ERROR(checkpoint.add_shards(files, index_path));
  } else {
    return user_error("{}: wanted {}, or {} and its shards; {}", directory, kSingleFile, kIndexFile,
                      other_weights(files, directory));
  }
  return checkpoint;
}

Status Checkpoint::add_file(const FileSystem& files, const std::string& name) {
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, files.open(join_path(directory_, name)));
  NIBBLE_ASSIGN_OR_RETURN(SafetensorsHeader header, read_safetensors_header(*file));
  files_.push_back(std::move(file));
  for (TensorInfo& info : header.tensors) {
    std::string key = info.name;
    auto [at, added] = tensors_.try_emplace(std::move(key));
    if (!added) {
      return user_error("{}: tensor {}: is also in {}", files_.back()->path(), quoted_name(info.name),
                        files_[at->second.file]->path());
    }
    at->second.info = std::move(info);
    at->second.file = files_.size() - 1;
  }
  return {};
}

Status Checkpoint::add_shards(const FileSystem& files, const std::string& index_path) {
  using WeightMap = std::map<std::string, std::string>;
  NIBBLE_ASSIGN_OR_RETURN(const WeightMap weight_map, read_shard_index(files, index_path));
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map) shards.insert(shard);
  if (shards.empty()) return user_error("{}: 'weight_map' names no tensor", index_path);

  std::vector<std::string> missing_shards;
  for (const std::string& shard : shards) {
    if (!files.exists(join_path(directory_, shard))) missing_shards.push_back(shard);
  }
  if (!missing_shards.empty()) {
    return user_error("{}: {} of {} shards missing, the first is {}", index_path, missing_shards.size(),
                      shards.size(), quoted_name(missing_shards.front()));
  }
  for (const std::string& shard : shards) NIBBLE_RETURN_IF_ERROR(add_file(files, shard));

  for (const auto& [name, shard] : weight_map) {
    auto at = tensors_.find(name);
    const std::string wanted = join_path(directory_, shard);
    if (at == tensors_.end())
      return user_error("{}: tensor {}: the index places it here, but it is not there", wanted,
                        quoted_name(name));
    if (const std::string& path = files_[at->second.file]->path(); path != wanted)
      return user_error("{}: tensor {}: the index places it here, but it is in {}", wanted, quoted_name(name),
                        path);
  }
  for (const auto& [name, entry] : tensors_) {
    if (weight_map.count(name) == 0) return tensor_error(name, "is not in the index");
  }
  return {};
}

const TensorInfo* Checkpoint::info(const std::string& name) const {
  auto at = tensors_.find(name);
  return at == tensors_.end() ? nullptr : &at->second.info;
}

std::vector<const TensorInfo*> Checkpoint::tensors() const {
  std::vector<const TensorInfo*> infos;
  infos.reserve(tensors_.size());
  for (const auto& [name, entry] : tensors_) infos.push_back(&entry.info);
  return infos;
}

std::vector<StoredTensor> Checkpoint::stored() const {
  std::vector<StoredTensor> all;
  for (const TensorInfo* tensor : tensors()) {
    const std::optional<MatrixFormat> matrix = format_of(*tensor);
    const std::string_view dtype = dtype_name(tensor->dtype);
    all.push_back({.name = tensor->name,
                   .dtype = dtype,
                   .format = matrix ? matrix_format_name(*matrix) : dtype,
                   .matrix = matrix,
                   .shape = tensor->shape,
                   .bytes = tensor->bytes});
  }
  return all;
}

// Codes and their scales count together.
std::optional<MatrixFormat> Checkpoint::format_of(const TensorInfo& tensor) const {
  const auto has_dtype = [&](const std::string& name, DType dtype) {
    const TensorInfo* there = info(name);
    return there != nullptr && there->dtype == dtype;
  };
  for (const std::string_view end :
       {".weight", ".weight_packed", ".weight_q4", ".weight_scale", ".weight_scale_2", ".weight_scale_inv",
        ".weight_global_scale", ".input_scale", ".input_global_scale", "_blocks", "_scales"}) {
    if (!tensor.name.ends_with(end)) continue;
    const std::string prefix = tensor.name.substr(0, tensor.name.size() - end.size());
    if (has(prefix + ".weight_scale_2") || has(prefix + ".weight_global_scale")) return MatrixFormat::kNvfp4;
    if (has(prefix + ".weight_q4")) return MatrixFormat::kQ4;
    const bool is_packed = has(prefix + ".weight_packed") && has_dtype(prefix + ".weight_scale", DType::kU8);
    if (is_packed || (has(prefix + "_blocks") && has(prefix + "_scales"))) return MatrixFormat::kMxfp4;
    if (has_dtype(prefix + ".weight", DType::kF8E4M3)) {
      return has(prefix + ".weight_scale_inv") ? MatrixFormat::kFp8Block : MatrixFormat::kF8E4M3;
    }
  }
  return plain_matrix_format(tensor.dtype);
}

int64_t Checkpoint::total_bytes() const {
  int64_t total = 0;
  for (const auto& [name, entry] : tensors_) total += entry.info.bytes;
  return total;
}

Result<TensorView> Checkpoint::tensor(const std::string& name, std::span<const int64_t> shape,
                                      std::initializer_list<DType> dtypes) {
  auto at = tensors_.find(name);
  if (at == tensors_.end()) return missing(name, "is missing");
  Entry& entry = at->second;
  const bool dtype_fits =
      dtypes.size() == 0 || std::find(dtypes.begin(), dtypes.end(), entry.info.dtype) != dtypes.end();
  if (!dtype_fits ||
      !std::equal(shape.begin(), shape.end(), entry.info.shape.begin(), entry.info.shape.end())) {
    std::vector<std::string_view> names;
    for (DType dtype : dtypes) names.push_back(dtype_name(dtype));
    std::string wanted = fmt::format("{}", fmt::join(names, ", "));
    if (size_t comma = wanted.rfind(", "); comma != std::string::npos) wanted.replace(comma, 2, " or ");
    return mismatch(entry.info,
                    fmt::format("{}{}{}", dtypes.size() == 0 ? "shape" : wanted, " ", format_shape(shape)));
  }
  NIBBLE_ASSIGN_OR_RETURN(std::span<const std::byte> bytes, bytes_of(entry));
  entry.used = true;
  return TensorView{&entry.info, bytes};
}

Result<std::span<const std::byte>> Checkpoint::bytes_of(Entry& entry) {
  const auto begin = static_cast<size_t>(entry.info.begin), size = static_cast<size_t>(entry.info.bytes);
  if (entry.copy != nullptr) return std::span<const std::byte>(entry.copy.get(), size);
  const File& file = *files_[entry.file];
  const std::span<const std::byte> mapped = file.map();
  const bool is_mapped = mapped.size() >= begin + size;
  const auto element_bytes = static_cast<uintptr_t>(dtype_bytes(entry.info.dtype));
  if (is_mapped && reinterpret_cast<uintptr_t>(mapped.data() + begin) % element_bytes == 0)
    return mapped.subspan(begin, size);

  // operator new aligns to 16, enough for every dtype.
  std::unique_ptr<std::byte[]> copy(new (std::nothrow) std::byte[size]);
  if (copy == nullptr)
    return tensor_error(entry.info.name, fmt::format("no memory for its {}", format_bytes(entry.info.bytes)));
  if (is_mapped) {
    std::memcpy(copy.get(), mapped.data() + begin, size);
  } else {
    Status status = file.read_at(entry.info.begin, {copy.get(), size});
    if (!status.ok()) return tensor_error(entry.info.name, "cannot be read: " + status.message());
  }
  entry.copy = std::move(copy);
  return std::span<const std::byte>(entry.copy.get(), size);
}

Status Checkpoint::read_at(const TensorInfo& tensor, int64_t offset, std::span<std::byte> out) const {
  NIBBLE_CHECK(offset >= 0 && offset + std::ssize(out) <= tensor.bytes);
  const auto at = tensors_.find(tensor.name);
  NIBBLE_CHECK(at != tensors_.end());
  Status status = files_[at->second.file]->read_at(tensor.begin + offset, out);
  return status.ok() ? status : tensor_error(tensor.name, "cannot be read: " + status.message());
}

Result<std::vector<float>> Checkpoint::floats(const std::string& name, std::span<const int64_t> shape) {
  NIBBLE_ASSIGN_OR_RETURN(const TensorView view,
                          tensor(name, shape, {DType::kBF16, DType::kF16, DType::kF32}));
  const DType dtype = view.info->dtype;
  std::vector<float> values(view.bytes.size() / static_cast<size_t>(dtype_bytes(dtype)));
  if (dtype == DType::kF32) {
    if (!values.empty()) std::memcpy(values.data(), view.bytes.data(), view.bytes.size());
  } else {
    const auto* codes = reinterpret_cast<const uint16_t*>(view.bytes.data());
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = dtype == DType::kBF16 ? bf16_to_float(codes[i]) : f16_to_float(codes[i]);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]))
      return tensor_error(name, fmt::format("wanted finite values, found {} at {}", values[i], i));
  }
  return values;
}

void Checkpoint::ignore(const std::string& name) {
  if (auto at = tensors_.find(name); at != tensors_.end()) at->second.used = true;
}

std::vector<std::string> Checkpoint::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors_) {
    if (!entry.used) names.push_back(name);
  }
  return names;
}

const std::string& Checkpoint::file_of(const std::string& name) const {
  auto at = tensors_.find(name);
  return at == tensors_.end() ? directory_ : files_[at->second.file]->path();
}

Status Checkpoint::tensor_error(const std::string& name, const std::string& what) const {
  return user_error("{}: tensor {}: {}", file_of(name), quoted_name(name), what);
}

Status Checkpoint::mismatch(const TensorInfo& info, const std::string& wanted) const {
  return tensor_error(info.name, fmt::format("wanted {}, found {} {}", wanted, dtype_name(info.dtype),
                                             format_shape(info.shape)));
}

Status Checkpoint::missing(const std::string& name, const std::string& why) const {
  // Nearest: the longest common beginning plus end, of which a typo, a suffix (weight_packed) or another root
  // (language_model.model) leaves most.
  const std::string* nearest = nullptr;
  size_t nearest_score = name.size() / 2;
  for (const auto& [other, entry] : tensors_) {
    const size_t score = std::min(common_prefix(name, other) + common_suffix(name, other), name.size());
    if (score > nearest_score) {
      nearest = &other;
      nearest_score = score;
    }
  }
  const std::string hint = nearest == nullptr ? "" : "; the nearest name there is " + quoted_name(*nearest);
  return tensor_error(name, why + hint);
}

}  // namespace nibble
