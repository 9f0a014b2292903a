#include "checkpoint/gguf.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include "base/numbers.h"
#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

constexpr const char* kPartNumber = "split.no";
constexpr const char* kPartCount = "split.count";
constexpr const char* kAllTensors = "split.tensors.count";
constexpr int64_t kMaxParts = 65535;  // the format stores it in 16 bits
constexpr int64_t kMaxTensors = std::numeric_limits<int32_t>::max();

// The end of the name of part `number`, counted from 0, of `count`.
std::string part_suffix(int64_t number, int64_t count) {
  return fmt::format("-{:05}-of-{:05}.gguf", number + 1, count);
}

std::string type_names(std::initializer_list<GgufType> types) {
  std::vector<std::string_view> names;
  for (GgufType type : types) names.push_back(gguf_type_info(type).name);
  if (names.empty()) {
    for (const GgufTypeInfo& info : gguf_types()) {
      if (info.readable) names.push_back(info.name);
    }
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

bool is_one_of(const GgufTypeInfo& type, std::initializer_list<GgufType> types) {
  if (types.size() == 0) return type.readable;
  return std::any_of(types.begin(), types.end(),
                     [&](GgufType wanted) { return static_cast<uint32_t>(wanted) == type.id; });
}

}  // namespace

Result<Gguf> Gguf::open(const FileSystem& files, const std::string& path) {
  Gguf gguf;
  NIBBLE_RETURN_IF_ERROR(gguf.add_file(files, path));
  NIBBLE_RETURN_IF_ERROR(gguf.add_parts(files));
  NIBBLE_RETURN_IF_ERROR(gguf.index_tensors());
  return gguf;
}

Status Gguf::add_file(const FileSystem& files, const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<File> file, files.open(path));
  NIBBLE_ASSIGN_OR_RETURN(GgufHeader header, read_gguf_header(*file));
  files_.push_back(std::move(file));
  headers_.push_back(std::move(header));
  return {};
}

Status Gguf::add_parts(const FileSystem& files) {
  const GgufMetadata& first = metadata();
  NIBBLE_ASSIGN_OR_RETURN(const int64_t count, first.integer(kPartCount, 0, kMaxParts, 1));
  if (count <= 1) return {};
  NIBBLE_ASSIGN_OR_RETURN(const int64_t number, first.integer(kPartNumber, 0, count - 1));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t tensors, first.integer(kAllTensors, 0, kMaxTensors));
  const std::string name = path();
  const std::string suffix = part_suffix(number, count);
  if (!name.ends_with(suffix)) {
    return user_error("{}: is part {} of {} (split.no {}), so wanted a name that ends in {}", name,
                      number + 1, count, number, quoted_name(suffix));
  }
  const std::string stem = name.substr(0, name.size() - suffix.size());
  if (number != 0) {
    return user_error("{}: is part {} of {}; open the first part, {}", name, number + 1, count,
                      stem + part_suffix(0, count));
  }
  for (int64_t i = 1; i < count; ++i) {
    const std::string part = stem + part_suffix(i, count);
    if (!files.exists(part)) return user_error("{}: part {} of {} is missing", part, i + 1, count);
    NIBBLE_RETURN_IF_ERROR(add_file(files, part));
    NIBBLE_RETURN_IF_ERROR(check_part(static_cast<size_t>(i), count, tensors));
  }
  int64_t found = 0;
  for (const GgufHeader& header : headers_) found += std::ssize(header.tensors);
  if (found != tensors) {
    return user_error("{}: metadata {}: wanted {} tensors, found {} in {} parts", name,
                      quoted_name(kAllTensors), tensors, found, count);
  }
  return {};
}

Status Gguf::check_part(size_t number, int64_t count, int64_t tensors) const {
  const GgufMetadata& part = headers_[number].metadata;
  const std::pair<const char*, int64_t> wanted[] = {
      {kPartNumber, static_cast<int64_t>(number)}, {kPartCount, count}, {kAllTensors, tensors}};
  for (const auto& [key, value] : wanted) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t found, part.integer(key, 0, kMaxTensors));
    if (found != value) {
      return part.wrong(key, fmt::format("{}, as the first part and the file's name say", value));
    }
  }
  return {};
}

Status Gguf::index_tensors() {
  for (size_t file = 0; file < files_.size(); ++file) {
    for (const GgufTensorInfo& info : headers_[file].tensors) {
      auto [at, added] = tensors_.try_emplace(info.name);
      if (!added) {
        return user_error("{}: tensor {}: is also in {}", files_[file]->path(), quoted_name(info.name),
                          files_[at->second.file]->path());
      }
      at->second.info = &info;
      at->second.file = file;
    }
  }
  return {};
}

const GgufTensorInfo* Gguf::info(const std::string& name) const {
  auto at = tensors_.find(name);
  return at == tensors_.end() ? nullptr : at->second.info;
}

std::vector<const GgufTensorInfo*> Gguf::tensors() const {
  std::vector<const GgufTensorInfo*> infos;
  infos.reserve(tensors_.size());
  for (const auto& [name, entry] : tensors_) infos.push_back(entry.info);
  return infos;
}

int64_t Gguf::total_bytes() const {
  int64_t total = 0;
  for (const auto& [name, entry] : tensors_) total += entry.info->bytes;
  return total;
}

Result<GgufTensorView> Gguf::tensor(const std::string& name, std::span<const int64_t> shape,
                                    std::initializer_list<GgufType> types) {
  auto at = tensors_.find(name);
  if (at == tensors_.end()) return tensor_error(name, "is missing");
  Entry& entry = at->second;
  const GgufTensorInfo& info = *entry.info;
  const bool shape_fits = std::equal(shape.begin(), shape.end(), info.shape.begin(), info.shape.end());
  if (!is_one_of(*info.type, types) || !shape_fits) {
    return tensor_error(name, fmt::format("wanted {} (one of {}), found {} {}", format_shape(shape),
                                          type_names(types), info.type->name, format_shape(info.shape)));
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, bytes_of(entry));
  entry.used = true;
  return GgufTensorView{&info, bytes};
}

Result<std::span<const std::byte>> Gguf::bytes_of(Entry& entry) {
  const auto begin = static_cast<size_t>(entry.info->begin), size = static_cast<size_t>(entry.info->bytes);
  if (entry.copy != nullptr) return std::span<const std::byte>(entry.copy.get(), size);
  const File& file = *files_[entry.file];
  // A mapping begins at a page, and the data is aligned to 8 or more from there.
  if (const std::span<const std::byte> mapped = file.map(); mapped.size() >= begin + size)
    return mapped.subspan(begin, size);
  std::unique_ptr<std::byte[]> copy(new (std::nothrow) std::byte[size]);
  if (copy == nullptr)
    return tensor_error(entry.info->name,
                        fmt::format("no memory for its {}", format_bytes(entry.info->bytes)));
  Status status = file.read_at(entry.info->begin, {copy.get(), size});
  if (!status.ok()) return tensor_error(entry.info->name, "cannot be read: " + status.message());
  entry.copy = std::move(copy);
  return std::span<const std::byte>(entry.copy.get(), size);
}

Result<std::vector<float>> Gguf::floats(const std::string& name, std::span<const int64_t> shape) {
  NIBBLE_ASSIGN_OR_RETURN(const GgufTensorView view, tensor(name, shape));
  const int64_t k = view.info->shape.back();
  const int64_t row_bytes = k / view.info->type->block_values * view.info->type->block_bytes;
  const int64_t rows = view.info->bytes / row_bytes;
  std::vector<float> values(static_cast<size_t>(rows * k));
  for (int64_t row = 0; row < rows; ++row) {
    dequantize_gguf_row(view.type(), reinterpret_cast<const uint8_t*>(view.bytes.data()) + row * row_bytes, k,
                        values.data() + row * k);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]))
      return tensor_error(name, fmt::format("wanted finite values, found {} at {}", values[i], i));
  }
  return values;
}

void Gguf::ignore(const std::string& name) {
  if (auto at = tensors_.find(name); at != tensors_.end()) at->second.used = true;
}

std::vector<std::string> Gguf::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors_) {
    if (!entry.used) names.push_back(name);
  }
  return names;
}

const std::string& Gguf::file_of(const std::string& name) const {
  auto at = tensors_.find(name);
  return at == tensors_.end() ? path() : files_[at->second.file]->path();
}

Status Gguf::tensor_error(const std::string& name, const std::string& what) const {
  return user_error("{}: tensor {}: {}", file_of(name), quoted_name(name), what);
}

}  // namespace nibble
