#include "checkpoint/gguf_header.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/numbers.h"
#include "checkpoint/gguf_reader.h"
#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

constexpr uint32_t kFirstVersion = 2, kLastVersion = 3;
constexpr int64_t kMaxKeyBytes = 65535;        // the format's own limit
constexpr int64_t kMaxTensorNameBytes = 1024;  // the format says 64; some writers go beyond
constexpr int64_t kMaxMetadataBytes = int64_t{1} << 30;
constexpr uint32_t kMaxDims = 4;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMinAlignment = 8, kMaxAlignment = 1 << 20;
// The least that an entry takes: a length and a character of its name, and what follows at the least.
constexpr int64_t kMinEntryBytes = 8 + 1 + 4 + 1;
constexpr int64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;

// Magic and version, with names for the kinds of file that people mistake for ours.
Result<uint32_t> read_version(GgufReader& reader) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view bytes, reader.take(4, "the magic 'GGUF'"));
  const std::string magic(bytes);
  if (magic == "FUGG") return user_error("is a big-endian GGUF file; nibble reads little-endian ones");
  if (magic == "lmgg" || magic == "fmgg" || magic == "tjgg" || magic == "algg") {
    return user_error("is a GGML file from before GGUF (magic {}); convert it to GGUF",
                      quoted_name(std::string(magic.rbegin(), magic.rend())));
  }
  if (magic == "vers" && reader.left() < 1024)
    return user_error("is a Git LFS pointer, not the weights; fetch them with `git lfs pull`");
  if (magic != "GGUF")
    return user_error("wanted the magic 'GGUF', found {}: not a GGUF file", quoted_name(magic));
  NIBBLE_ASSIGN_OR_RETURN(const auto version, reader.number<uint32_t>("the version"));
  if (const uint32_t swapped = __builtin_bswap32(version); swapped >= 1 && swapped <= kLastVersion)
    return user_error("is a big-endian GGUF file (version {}); nibble reads little-endian ones", swapped);
  if (version < kFirstVersion || version > kLastVersion) {
    return user_error("wanted GGUF version {} or {}, found {}{}", kFirstVersion, kLastVersion, version,
                      version == 1 ? "; convert it with a newer gguf package" : "");
  }
  return version;
}

Result<int64_t> read_count(GgufReader& reader, std::string_view what) {
  NIBBLE_ASSIGN_OR_RETURN(const auto count, reader.number<uint64_t>(fmt::format("the number of {}", what)));
  // Checked against the length of the file once both counts are read; here only that it is a number.
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    return user_error("claims {} {}, beyond 63 bits", count, what);
  return static_cast<int64_t>(count);
}

Status check_counts(const GgufReader& reader, int64_t tensors, int64_t entries) {
  const int64_t left = reader.left();
  if (entries > left / kMinEntryBytes) {
    return user_error("claims {} metadata entries of at least {} bytes each, but has only {} bytes left",
                      entries, kMinEntryBytes, left);
  }
  if (tensors > (left - entries * kMinEntryBytes) / kMinTensorBytes) {
    return user_error("claims {} tensors of at least {} header bytes each, but has only {} bytes left",
                      tensors, kMinTensorBytes, left);
  }
  return {};
}

// Reads values into at most kMaxMetadataBytes.
class ValueReader {
 public:
  explicit ValueReader(GgufReader& reader) : reader_(reader) {}

  Result<GgufValue> read() {
    GgufValue value;
    NIBBLE_ASSIGN_OR_RETURN(value.type, read_type("the value's type"));
    if (value.type == GgufValueType::kArray) {
      value.is_array = true;
      NIBBLE_ASSIGN_OR_RETURN(value.type, read_type("the array's type"));
      if (value.type == GgufValueType::kArray) return user_error("an array of arrays is not implemented");
      NIBBLE_RETURN_IF_ERROR(read_array(value));
    } else if (value.type == GgufValueType::kString) {
      NIBBLE_ASSIGN_OR_RETURN(const std::string_view text, reader_.string(kMaxMetadataBytes, "a string"));
      NIBBLE_RETURN_IF_ERROR(keep(text, value));
    } else {
      NIBBLE_RETURN_IF_ERROR(read_numbers(1, value));
    }
    return value;
  }

 private:
  Result<GgufValueType> read_type(std::string_view what) {
    NIBBLE_ASSIGN_OR_RETURN(const auto id, reader_.number<uint32_t>(what));
    const auto type = static_cast<GgufValueType>(id);
    if (gguf_value_type_name(type).empty())
      return user_error("{} is {}, which is no type of GGUF (0 to 12)", what, id);
    return type;
  }

  Status read_array(GgufValue& value) {
    NIBBLE_ASSIGN_OR_RETURN(const auto count, reader_.number<uint64_t>("the array's length"));
    const bool is_text = value.type == GgufValueType::kString;
    const int64_t least_bytes = is_text ? 8 : gguf_value_bytes(value.type);
    if (count > static_cast<uint64_t>(reader_.left() / least_bytes)) {
      return user_error(
          "an array claims {} values of at least {} bytes each, but the file has only {} bytes left", count,
          least_bytes, reader_.left());
    }
    value.count = static_cast<int64_t>(count);
    if (!is_text) return read_numbers(value.count, value);
    for (int64_t i = 0; i < value.count; ++i) {
      NIBBLE_ASSIGN_OR_RETURN(const std::string_view text,
                              reader_.string(kMaxMetadataBytes, "a string of an array"));
      const uint64_t size = text.size();
      NIBBLE_RETURN_IF_ERROR(keep({reinterpret_cast<const char*>(&size), sizeof(size)}, value));
      NIBBLE_RETURN_IF_ERROR(keep(text, value));
    }
    return {};
  }

  Status read_numbers(int64_t count, GgufValue& value) {
    const int64_t bytes = count * gguf_value_bytes(value.type);
    if (bytes > kMaxMetadataBytes) return too_large();
    NIBBLE_ASSIGN_OR_RETURN(
        const std::string_view raw,
        reader_.take(static_cast<uint64_t>(bytes), fmt::format("a {}", gguf_value_type_name(value.type))));
    if (value.type == GgufValueType::kBool) {
      const auto bad = std::find_if(raw.begin(), raw.end(), [](char c) { return c != 0 && c != 1; });
      if (bad != raw.end())
        return user_error("wanted a bool of 0 or 1, found {}", static_cast<unsigned char>(*bad));
    }
    return keep(raw, value);
  }

  Status keep(std::string_view bytes, GgufValue& value) {
    kept_bytes_ += std::ssize(bytes);
    if (kept_bytes_ > kMaxMetadataBytes) return too_large();
    value.raw.append(bytes);
    return {};
  }

  static Status too_large() {
    return user_error("the metadata has more than {}", format_bytes(kMaxMetadataBytes));
  }

  GgufReader& reader_;
  int64_t kept_bytes_ = 0;
};

Status read_metadata(GgufReader& reader, int64_t count, GgufMetadata& metadata) {
  ValueReader values(reader);
  for (int64_t i = 0; i < count; ++i) {
    const auto where = [&] { return fmt::format("metadata entry {} of {}", i + 1, count); };
    Result<std::string_view> text = reader.string(kMaxKeyBytes, "its key");
    if (!text.ok()) return text.status().with_context(where());
    std::string key(*text);
    if (key.empty()) return user_error("{}: has an empty key", where());
    Result<GgufValue> value = values.read();
    if (!value.ok()) return value.status().with_context("metadata " + quoted_name(key));
    if (metadata.has(key)) return user_error("metadata {}: is there twice", quoted_name(key));
    metadata.add(std::move(key), std::move(value).value());
  }
  return {};
}

// Without the name; `begin` still counts from the beginning of the data.
Status read_tensor(GgufReader& reader, int64_t alignment, GgufTensorInfo& tensor) {
  NIBBLE_ASSIGN_OR_RETURN(const auto dims, reader.number<uint32_t>("the number of its dims"));
  if (dims < 1 || dims > kMaxDims) return user_error("wanted 1 to {} dims, found {}", kMaxDims, dims);
  for (uint32_t i = 0; i < dims; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const auto dim, reader.number<uint64_t>("its dims"));
    if (dim == 0 || dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return user_error("wanted dims from 1 to 2^63 - 1, found {}", dim);
    tensor.shape.push_back(static_cast<int64_t>(dim));
  }
  std::reverse(tensor.shape.begin(), tensor.shape.end());
  NIBBLE_ASSIGN_OR_RETURN(const auto type, reader.number<uint32_t>("its type"));
  tensor.type = find_gguf_type(type);
  if (tensor.type == nullptr) return user_error("its type is {}, which nibble does not know", type);
  NIBBLE_ASSIGN_OR_RETURN(const auto offset, reader.number<uint64_t>("its offset"));

  const int64_t k = tensor.shape.back();
  if (k % tensor.type->block_values != 0) {
    return user_error("{} {}: wanted rows of a multiple of {} values, found {}", tensor.type->name,
                      format_shape(tensor.shape), tensor.type->block_values, k);
  }
  std::vector<int64_t> factors = tensor.shape;
  factors.back() = k / tensor.type->block_values;
  factors.push_back(tensor.type->block_bytes);
  const std::optional<int64_t> bytes = checked_product(factors);
  if (!bytes.has_value() || offset > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return user_error("{} {} at offset {}: more bytes than 63 bits can count", tensor.type->name,
                      format_shape(tensor.shape), offset);
  }
  if (offset % static_cast<uint64_t>(alignment) != 0)
    return user_error("wanted an offset that is a multiple of the alignment {}, found {}", alignment, offset);
  tensor.bytes = *bytes;
  tensor.begin = static_cast<int64_t>(offset);
  return {};
}

Status read_tensors(GgufReader& reader, int64_t count, GgufHeader& header) {
  for (int64_t i = 0; i < count; ++i) {
    Result<std::string_view> name = reader.string(kMaxTensorNameBytes, "its name");
    if (!name.ok()) return name.status().with_context(fmt::format("tensor {} of {}", i + 1, count));
    GgufTensorInfo tensor;
    tensor.name = *name;
    if (tensor.name.empty()) return user_error("tensor {} of {}: has an empty name", i + 1, count);
    Status status = read_tensor(reader, header.alignment, tensor);
    if (!status.ok()) return status.with_context("tensor " + quoted_name(tensor.name));
    header.tensors.push_back(std::move(tensor));
  }
  return {};
}

Status check_names(std::vector<GgufTensorInfo>& tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const GgufTensorInfo& a, const GgufTensorInfo& b) { return a.name < b.name; });
  auto twice = std::adjacent_find(tensors.begin(), tensors.end(),
                                  [](const auto& a, const auto& b) { return a.name == b.name; });
  if (twice != tensors.end()) return user_error("tensor {}: is there twice", quoted_name(twice->name));
  return {};
}

// Makes offsets absolute. Between tensors there may be padding; there is no use in refusing more of it.
Status place_tensors(int64_t data_begin, int64_t file_bytes, std::vector<GgufTensorInfo>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const GgufTensorInfo& a, const GgufTensorInfo& b) {
    return std::tie(a.begin, a.name) < std::tie(b.begin, b.name);
  });
  const GgufTensorInfo* previous = nullptr;
  for (GgufTensorInfo& tensor : tensors) {
    const std::optional<int64_t> begin = checked_add(data_begin, tensor.begin);
    const std::optional<int64_t> end = begin.has_value() ? checked_add(*begin, tensor.bytes) : std::nullopt;
    if (!end.has_value() || *end > file_bytes) {
      return user_error(
          "tensor {}: truncated: file has {} bytes, but its {} bytes of data begin at byte {} + {}",
          quoted_name(tensor.name), file_bytes, tensor.bytes, data_begin, tensor.begin);
    }
    tensor.begin = *begin;
    if (previous != nullptr && tensor.begin < previous->begin + previous->bytes) {
      return user_error("tensor {}: begins at byte {}, inside tensor {}, which ends at {}: an overlap",
                        quoted_name(tensor.name), tensor.begin, quoted_name(previous->name),
                        previous->begin + previous->bytes);
    }
    previous = &tensor;
  }
  return {};
}

Result<GgufHeader> read_header(const File& file) {
  GgufReader reader(file);
  GgufHeader header{.metadata = GgufMetadata(file.path())};
  NIBBLE_ASSIGN_OR_RETURN(header.version, read_version(reader));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t tensors, read_count(reader, "tensors"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t entries, read_count(reader, "metadata entries"));
  NIBBLE_RETURN_IF_ERROR(check_counts(reader, tensors, entries));
  NIBBLE_RETURN_IF_ERROR(read_metadata(reader, entries, header.metadata));
  NIBBLE_ASSIGN_OR_RETURN(header.alignment, header.metadata.integer("general.alignment", kMinAlignment,
                                                                    kMaxAlignment, kDefaultAlignment));
  if ((header.alignment & (header.alignment - 1)) != 0)
    return header.metadata.wrong("general.alignment", "a power of two");
  NIBBLE_RETURN_IF_ERROR(read_tensors(reader, tensors, header));
  NIBBLE_RETURN_IF_ERROR(check_names(header.tensors));
  const int64_t data_begin = round_up(reader.position(), header.alignment);
  NIBBLE_RETURN_IF_ERROR(place_tensors(data_begin, file.size_bytes(), header.tensors));
  return header;
}

}  // namespace

Result<GgufHeader> read_gguf_header(const File& file) {
  Result<GgufHeader> header = read_header(file);
  if (header.ok()) return header;
  // Errors of reading and of metadata name the file already.
  const std::string& message = header.status().message();
  return message.starts_with(file.path()) ? header.status() : header.status().with_context(file.path());
}

}  // namespace nibble
