#include "model/synthetic_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/hash.h"
#include "base/numbers.h"
#include "model/synthetic_model.h"
#include "model/synthetic_tensors.h"
#include "quant/float_codes.h"

namespace nibble {
namespace {

constexpr int64_t kAlign = 64;  // of each matrix, a cache line

// splitmix64 (Steele, Lea, Flood 2014): any seed gives a good sequence.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // Even over [-1, 1).
  float even() { return static_cast<float>(static_cast<int64_t>(next()) >> 40) * 0x1p-23f; }

 private:
  uint64_t state_;
};

// The mean square of the 16 values of e2m1 and of int4, and of the block scales below.
constexpr double kE2m1Square = 68.5 / 8, kInt4Square = 21.5, kScaleSquare = 0x1p-8 * 134.75 / 64;

// Numbers of unit variance.
void fill_bf16(Random& random, std::vector<std::byte>& bytes) {
  const float width = std::sqrt(3.0f);
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
    const uint16_t code = float_to_bf16(width * random.even());
    std::memcpy(&bytes[i], &code, sizeof(code));
  }
}
void fill_codes(Random& random, std::vector<std::byte>& bytes) {
  for (size_t i = 0; i + 7 < bytes.size(); i += 8) {
    const uint64_t sixteen = random.next();
    std::memcpy(&bytes[i], &sixteen, sizeof(sixteen));
  }
}
// The 8 scales from 2^-4 up to the next power.
float scale(uint64_t i) { return 0x1p-4f * (1 + static_cast<float>(i) / 8); }
void fill_scales(Random& random, std::vector<std::byte>& bytes) {
  std::byte scales[8];
  for (uint64_t i = 0; i < 8; ++i) scales[i] = static_cast<std::byte>(float_to_e4m3(scale(i)));
  for (std::byte& b : bytes) b = scales[random.next() >> 61];
}
void fill_f16_scales(Random& random, std::vector<std::byte>& bytes) {
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
    const uint16_t code = float_to_f16(scale(random.next() >> 61));
    std::memcpy(&bytes[i], &code, sizeof(code));
  }
}

}  // namespace

SyntheticWeights::SyntheticWeights(const ModelSpec& spec, std::string name) : name_(std::move(name)) {
  for (SyntheticTensor& t : synthetic_tensors(spec, synthetic_format(name_))) {
    const bool is_new = tensors_.emplace(t.name, Tensor{std::move(t.shape), t.format}).second;
    NIBBLE_CHECK(is_new);
  }
}

Result<std::unique_ptr<SyntheticWeights>> SyntheticWeights::make(const ModelSpec& spec,
                                                                 const std::string& name,
                                                                 const FormatsCopied& copied) {
  std::unique_ptr<SyntheticWeights> weights(new SyntheticWeights(spec, name));
  // The longest run of each pool that a tensor takes (what is copied out of it may be put together), and the
  // bytes of those that have their own.
  int64_t bf16 = 0, codes = 0, scales = 0, own = 0;
  for (auto& [tensor_name, t] : weights->tensors_) {
    if (t.format == MatrixFormat::kF32) continue;
    t.own_bytes = !copied(t.format);
    const int64_t code_bytes = matrix_code_bytes(t.format, t.shape[0], t.shape[1]),
                  scale_bytes = matrix_scale_bytes(t.format, t.shape[0], t.shape[1]);
    if (t.own_bytes) {
      own += round_up(code_bytes, kAlign) + round_up(scale_bytes, kAlign);
      continue;
    }
    int64_t& longest = t.format == MatrixFormat::kBF16 ? bf16 : codes;
    longest = std::max(longest, code_bytes);
    scales = std::max(scales, scale_bytes);
  }
  NIBBLE_ASSIGN_OR_RETURN(weights->own_bytes_, Buffer::allocate(host_memory(), own, name));
  auto fill = [](Pool& pool, int64_t period, int64_t longest, auto filler) {
    Random random(static_cast<uint64_t>(period));
    pool.period = period;
    pool.bytes.resize(static_cast<size_t>(period));
    filler(random, pool.bytes);
    pool.bytes.resize(static_cast<size_t>(period + longest));
    for (int64_t at = period; at < period + longest; at += period) {
      std::memcpy(&pool.bytes[static_cast<size_t>(at)], pool.bytes.data(),
                  static_cast<size_t>(std::min(period, period + longest - at)));
    }
  };
  // Larger than caches, so that a device that converts what it copies reads memory too.
  fill(weights->bf16_, INT64_C(64) << 20, bf16, fill_bf16);
  fill(weights->codes_, INT64_C(32) << 20, codes, fill_codes);
  const bool is_q4 = synthetic_format(name) == MatrixFormat::kQ4;
  fill(weights->scales_, INT64_C(8) << 20, scales, is_q4 ? fill_f16_scales : fill_scales);
  return weights;
}

bool SyntheticWeights::has(const std::string& name) const { return tensors_.contains(name); }

int64_t SyntheticWeights::total_bytes() const {
  int64_t total = 0;
  for (const StoredTensor& tensor : stored()) total += tensor.bytes;
  return total;
}

std::vector<StoredTensor> SyntheticWeights::stored() const {
  std::vector<StoredTensor> all;
  for (const auto& [name, t] : tensors_) {
    auto add = [&, &t = t](const std::string& of, DType dtype, std::vector<int64_t> shape, int64_t bytes) {
      all.push_back({.name = of,
                     .dtype = dtype_name(dtype),
                     .format = matrix_format_name(t.format),
                     .matrix = t.format,
                     .shape = std::move(shape),
                     .bytes = bytes});
    };
    if (t.format == MatrixFormat::kF32) {
      add(name, DType::kF32, t.shape, checked_product(t.shape).value() * dtype_bytes(DType::kF32));
      continue;
    }
    const int64_t n = t.shape[0], k = t.shape[1];
    const bool quantized = t.format != MatrixFormat::kBF16, is_q4 = t.format == MatrixFormat::kQ4;
    add(name + ".weight", quantized ? DType::kU8 : DType::kBF16, {n, quantized ? k / 2 : k},
        matrix_code_bytes(t.format, n, k));
    if (!quantized) continue;
    add(name + ".weight_scale", is_q4 ? DType::kF16 : DType::kF8E4M3, {n, k / (is_q4 ? 32 : 16)},
        matrix_scale_bytes(t.format, n, k));
  }
  return all;
}

Result<SyntheticWeights::Tensor*> SyntheticWeights::find(const std::string& name,
                                                         std::span<const int64_t> shape) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end() || !std::ranges::equal(found->second.shape, shape)) {
    // Both lists are ours: that of the loader, and synthetic_tensors.
    return internal_error("{}: tensor '{}': wanted {}, found {}", name_, name, format_shape(shape),
                          found == tensors_.end() ? "none" : format_shape(found->second.shape));
  }
  found->second.used = true;
  return &found->second;
}

Result<std::vector<float>> SyntheticWeights::floats(const std::string& name, std::span<const int64_t> shape) {
  NIBBLE_RETURN_IF_ERROR(find(name, shape).status());
  // Weights of norms are about 1; what is multiplied with K inputs gives about 1.
  const bool is_norm = name.ends_with("norm.weight");
  const float centre = is_norm ? 1.0f : 0.0f,
              width = is_norm ? 0.1f : 1 / std::sqrt(static_cast<float>(shape.back()));
  std::vector<float> values(static_cast<size_t>(checked_product(shape).value()));
  Random random(hash_text(name));
  for (float& value : values) value = centre + width * random.even();
  return values;
}

const void* SyntheticWeights::take(const Pool& pool, const std::string& name, int64_t bytes, bool own) {
  const int64_t start =
      static_cast<int64_t>(hash_text(name) % static_cast<uint64_t>(pool.period / kAlign)) * kAlign;
  if (!own) return pool.bytes.data() + start;
  std::byte* to = own_bytes_.as<std::byte>() + taken_;
  for (int64_t done = 0; done < bytes;) {
    const int64_t from = (start + done) % pool.period, count = std::min(bytes - done, pool.period - from);
    std::memcpy(to + done, pool.bytes.data() + from, static_cast<size_t>(count));
    done += count;
  }
  taken_ += round_up(bytes, kAlign);
  NIBBLE_CHECK(taken_ <= own_bytes_.bytes());
  return to;
}

Result<Matrix> SyntheticWeights::matrix(const std::string& prefix, int64_t n, int64_t k) {
  const int64_t shape[] = {n, k};
  NIBBLE_ASSIGN_OR_RETURN(const Tensor* tensor, find(prefix, shape));
  Matrix m{.format = tensor->format, .n = n, .k = k};
  // Inputs of unit variance give outputs of it. A BF16 matrix of a checkpoint has no such factor; every
  // backend multiplies by one all the same.
  m.tensor_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(k)));
  if (m.format == MatrixFormat::kBF16) {
    m.codes = take(bf16_, prefix, matrix_code_bytes(m.format, n, k), tensor->own_bytes);
  } else {
    const double code_square = m.format == MatrixFormat::kQ4 ? kInt4Square : kE2m1Square;
    m.tensor_scale = static_cast<float>(m.tensor_scale / std::sqrt(code_square * kScaleSquare));
    m.codes = take(codes_, prefix, matrix_code_bytes(m.format, n, k), tensor->own_bytes);
    m.scales = take(scales_, prefix + ".scale", matrix_scale_bytes(m.format, n, k), tensor->own_bytes);
  }
  return m;
}

Result<std::vector<Matrix>> SyntheticWeights::stacked(const std::string& name, int64_t /*experts*/,
                                                      int64_t /*n*/, int64_t /*k*/, RowSplit /*split*/) {
  return internal_error("{}: tensor '{}' cannot be stacked", name_, name);
}

Result<std::vector<float>> SyntheticWeights::stacked_bias(const std::string& name, int64_t /*experts*/,
                                                          int64_t /*n*/, RowSplit /*split*/) {
  return internal_error("{}: tensor '{}' cannot be stacked", name_, name);
}

std::vector<std::string> SyntheticWeights::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) {
    if (!tensor.used) names.push_back(name);
  }
  return names;
}

}  // namespace nibble
