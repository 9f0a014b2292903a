#include "checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include "base/numbers.h"
#include "checkpoint/json_reader.h"

namespace nibble {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxDims = 8;
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// Reads the JSON header into tensors whose `begin` still counts from the end of the header.
class HeaderReader final : public JsonReader {
 public:
  std::vector<TensorInfo> tensors;
  std::vector<std::string> metadata_keys;

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor, kShape, kOffsets };
  enum class Field { kDType, kShape, kOffsets };

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kOutside:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        if (name_ == "__metadata__") {
          if (saw_metadata_) return fail(user_error("header: '__metadata__' is there twice"));
          saw_metadata_ = true;
          place_ = Place::kMetadata;
          return true;
        }
        place_ = Place::kTensor;
        dtype_.reset();
        saw_shape_ = saw_offsets_ = false;
        shape_.clear();
        offsets_.clear();
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(std::string& key) override {
    if (place_ == Place::kTop) {
      name_ = std::move(key);
      return true;
    }
    if (place_ == Place::kMetadata) {
      metadata_keys.push_back(std::move(key));
      return true;
    }
    bool twice = false;
    if (key == "dtype") {
      field_ = Field::kDType;
      twice = dtype_.has_value();
    } else if (key == "shape") {
      field_ = Field::kShape;
      twice = saw_shape_;
    } else if (key == "data_offsets") {
      field_ = Field::kOffsets;
      twice = saw_offsets_;
    } else {
      return tensor_error("unknown field {}", quoted_name(key));
    }
    return twice ? tensor_error("field {} is there twice", quoted_name(key)) : true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || field_ != Field::kDType) return unexpected("a string");
    dtype_ = dtype_from_name(text);
    return dtype_ ? true : tensor_error("dtype {} is not one that nibble reads", quoted_name(text));
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == Field::kDType) return unexpected("an array");
    if (field_ == Field::kShape) {
      place_ = Place::kShape;
      saw_shape_ = true;
    } else {
      place_ = Place::kOffsets;
      saw_offsets_ = true;
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool number_unsigned(uint64_t number) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return unexpected("a number");
    if (number > static_cast<uint64_t>(kMaxInt64))
      return unexpected(fmt::format("{} (beyond 64 bits)", number));
    if (place_ == Place::kShape) {
      if (shape_.size() == kMaxDims) return tensor_error("shape has more than {} dims", kMaxDims);
      shape_.push_back(static_cast<int64_t>(number));
    } else {
      if (offsets_.size() == 2) return tensor_error("data_offsets: wanted 2 numbers, found more");
      offsets_.push_back(static_cast<int64_t>(number));
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTop) {
      place_ = Place::kOutside;
      return true;
    }
    const bool was_tensor = place_ == Place::kTensor;
    place_ = Place::kTop;
    return was_tensor ? finish_tensor() : true;
  }

  bool finish_tensor() {
    if (!dtype_) return tensor_error("field 'dtype' is missing");
    if (!saw_shape_) return tensor_error("field 'shape' is missing");
    if (!saw_offsets_) return tensor_error("field 'data_offsets' is missing");
    if (offsets_.size() != 2)
      return tensor_error("data_offsets: wanted 2 numbers, found {}", offsets_.size());
    const int64_t begin = offsets_[0], end = offsets_[1];
    if (begin > end) return tensor_error("data_offsets [{}, {}] end before they begin", begin, end);
    std::optional<int64_t> bytes = checked_product(shape_);
    if (bytes) bytes = checked_mul(*bytes, dtype_bytes(*dtype_));
    if (!bytes) return tensor_error("shape {} has more bytes than 63 bits can count", format_shape(shape_));
    if (*bytes != end - begin) {
      return tensor_error("{} {} has {} bytes, but its data_offsets [{}, {}] span {}", dtype_name(*dtype_),
                          format_shape(shape_), *bytes, begin, end, end - begin);
    }
    tensors.push_back({std::move(name_), *dtype_, shape_, begin, *bytes});
    return true;
  }

  bool unexpected(std::string_view what) override {
    switch (place_) {
      case Place::kOutside:
        return fail(user_error("header is not a JSON object but {}", what));
      case Place::kTop:
        if (name_ == "__metadata__")
          return fail(user_error("header: '__metadata__': wanted an object of strings, found {}", what));
        return tensor_error("wanted an object with dtype, shape and data_offsets, found {}", what);
      case Place::kMetadata:
        return fail(user_error("header: '__metadata__': wanted strings, found {}", what));
      case Place::kTensor:
        if (field_ == Field::kDType) return tensor_error("dtype: wanted a string, found {}", what);
        return tensor_error("{}: wanted an array, found {}",
                            field_ == Field::kShape ? "shape" : "data_offsets", what);
      case Place::kShape:
        return tensor_error("shape: wanted integers of at least 0, found {}", what);
      case Place::kOffsets:
        return tensor_error("data_offsets: wanted integers of at least 0, found {}", what);
    }
    return false;
  }

  template <class... Args>
  bool tensor_error(fmt::format_string<Args...> format, Args&&... args) {
    return fail(user_error(format, std::forward<Args>(args)...).with_context("tensor " + quoted_name(name_)));
  }

  Place place_ = Place::kOutside;
  bool saw_metadata_ = false;
  // The tensor that is being read.
  std::string name_;
  Field field_ = Field::kDType;
  std::optional<DType> dtype_;
  bool saw_shape_ = false, saw_offsets_ = false;
  std::vector<int64_t> shape_, offsets_;
};

// Sorts by name and back, instead of a set: no allocation for each tensor.
Status check_names(HeaderReader& reader) {
  auto by_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
  std::sort(reader.tensors.begin(), reader.tensors.end(), by_name);
  auto same_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; };
  auto twice = std::adjacent_find(reader.tensors.begin(), reader.tensors.end(), same_name);
  if (twice != reader.tensors.end())
    return user_error("tensor {}: is in the header twice", quoted_name(twice->name));
  std::vector<std::string>& keys = reader.metadata_keys;
  std::sort(keys.begin(), keys.end());
  auto key_twice = std::adjacent_find(keys.begin(), keys.end());
  if (key_twice != keys.end())
    return user_error("header: '__metadata__': key {} is there twice", quoted_name(*key_twice));
  return {};
}

// The tensors, sorted by position, must tile [0, data_bytes).
Status check_tiling(const std::vector<TensorInfo>& tensors, int64_t header_end, int64_t file_bytes) {
  int64_t end = 0;
  for (const TensorInfo& tensor : tensors) end = std::max(end, tensor.begin + tensor.bytes);
  const int64_t data_bytes = file_bytes - header_end;
  if (end > data_bytes) {
    const std::optional<int64_t> wanted = checked_add(header_end, end);
    return user_error("truncated: file has {} bytes, header describes {}", file_bytes,
                      wanted ? std::to_string(*wanted) : "more than 63 bits can count");
  }
  int64_t covered = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin > covered) {
      return user_error("tensor {}: begins at data byte {}, but the data before it ends at {}: a hole",
                        quoted_name(tensor.name), tensor.begin, covered);
    }
    if (tensor.begin < covered) {
      return user_error("tensor {}: begins at data byte {}, inside tensor {}, which ends at {}: an overlap",
                        quoted_name(tensor.name), tensor.begin, quoted_name(previous->name), covered);
    }
    covered = tensor.begin + tensor.bytes;
    previous = &tensor;
  }
  if (covered < data_bytes) {
    return user_error("{} bytes after the last tensor: file has {} bytes, header describes {}",
                      data_bytes - covered, file_bytes, header_end + covered);
  }
  return {};
}

Result<SafetensorsHeader> read_header(const File& file) {
  const int64_t file_bytes = file.size_bytes();
  if (file_bytes < kLengthBytes) {
    return user_error("truncated: file has {} bytes, fewer than the {} of a safetensors header length",
                      file_bytes, kLengthBytes);
  }
  std::array<std::byte, kLengthBytes> length_bytes;
  NIBBLE_RETURN_IF_ERROR(file.read_at(0, length_bytes));
  uint64_t length = 0;
  for (size_t i = 0; i < length_bytes.size(); ++i)
    length |= static_cast<uint64_t>(length_bytes[i]) << (8 * i);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    // A clone without git-lfs leaves these small text files in the place of weights.
    constexpr uint64_t kVersion = 0x206E6F6973726576;  // "version "
    if (length == kVersion && file_bytes < 1024)
      return user_error("is a Git LFS pointer, not the weights; fetch them with `git lfs pull`");
    return user_error("header length {} is more than the {} that safetensors allows; not a safetensors file?",
                      length, kMaxHeaderBytes);
  }
  const int64_t header_end = kLengthBytes + static_cast<int64_t>(length);
  if (header_end > file_bytes) {
    return user_error("truncated: file has {} bytes, header alone goes to byte {}", file_bytes, header_end);
  }

  std::string copy;
  std::string_view text;
  if (std::span<const std::byte> mapped = file.map(); std::ssize(mapped) >= header_end) {
    text = {reinterpret_cast<const char*>(mapped.data()) + kLengthBytes, length};
  } else {
    copy.resize(length);
    NIBBLE_RETURN_IF_ERROR(file.read_at(kLengthBytes, std::as_writable_bytes(std::span(copy))));
    text = copy;
  }
  // The parser would let a byte order mark or white space pass; the format does not.
  if (!text.starts_with('{')) return user_error("header is not a JSON object: it does not begin with '{{'");
  HeaderReader reader;
  if (Status status = reader.read(text); !status.ok())
    return status.message().starts_with("is not") ? status.with_context("header") : status;
  NIBBLE_RETURN_IF_ERROR(check_names(reader));

  SafetensorsHeader header{std::move(reader.tensors)};
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.bytes, a.name) < std::tie(b.begin, b.bytes, b.name);
  });
  NIBBLE_RETURN_IF_ERROR(check_tiling(header.tensors, header_end, file_bytes));
  for (TensorInfo& tensor : header.tensors) tensor.begin += header_end;
  return header;
}

}  // namespace

Result<SafetensorsHeader> read_safetensors_header(const File& file) {
  Result<SafetensorsHeader> header = read_header(file);
  if (header.ok()) return header;
  // Read errors name the file already.
  const std::string& message = header.status().message();
  return message.starts_with(file.path()) ? header.status() : header.status().with_context(file.path());
}

std::string quoted_name(std::string_view name) {
  constexpr size_t kLongest = 200;
  size_t size = std::min(name.size(), kLongest);
  while (size < name.size() && size > 0 && (static_cast<unsigned char>(name[size]) & 0xC0) == 0x80) --size;
  std::string out = "'";
  for (char c : name.substr(0, size)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  out += size < name.size() ? "...'" : "'";
  return out;
}

}  // namespace nibble
