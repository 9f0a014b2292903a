#include "ops/self_test.h"

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/backend.h"
#include "quant/float_codes.h"

namespace nibble {
namespace {

// Sizes with tails: no multiple of 128, several rows an expert, one expert without rows; many rows for
// formats that have kernels of their own for those.
constexpr int64_t kExperts = 4, kChosen = 2, kWidth = 160, kExpertWidth = 96;
constexpr int64_t kTokens = 5, kManyTokens = 70;
// The formats whose kernels differ from machine to machine.
using enum MatrixFormat;
constexpr std::array kFormats = {kF32, kF16, kBF16, kNvfp4, kMxfp4, kQ4, kF8E4M3, kFp8Block};
// float32 sums of 160 products in another order differ by less than this share of the largest output.
constexpr double kTolerance = 1e-4;
// With activations in 8 bits: each of three products is off by about 0.5% of what such a sum is like.
constexpr double kRoundedTolerance = 3e-2;

// A fixed sequence in [-1, 1).
class Numbers {
 public:
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int64_t>(state_ >> 40) - (1 << 23)) * 0x1p-23f;
  }

 private:
  uint64_t state_ = 2026;
};

struct HostMatrix {
  std::vector<uint8_t> codes, scales;
  Matrix matrix;
};

template <class T>
void put(std::vector<uint8_t>& bytes, int64_t element, T value) {
  std::memcpy(bytes.data() + element * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

// Numbers of plain formats are below 1; of the others every code occurs, under scales of about 2^-8.
HostMatrix make_matrix(MatrixFormat format, int64_t n, int64_t k, Numbers& numbers) {
  HostMatrix m;
  m.matrix = {.format = format, .n = n, .k = k};
  m.codes.resize(static_cast<size_t>(matrix_code_bytes(format, n, k)));
  m.scales.resize(static_cast<size_t>(matrix_scale_bytes(format, n, k)));
  auto below = [&](int count) {
    return static_cast<int>((numbers.next() + 1.0f) * 0.5f * static_cast<float>(count));
  };
  const int64_t codes = std::ssize(m.codes), scales = std::ssize(m.scales);
  switch (format) {
    case kF32:
      for (int64_t i = 0; i < codes / 4; ++i) put(m.codes, i, numbers.next());
      break;
    case kF16:
      for (int64_t i = 0; i < codes / 2; ++i) put(m.codes, i, float_to_f16(numbers.next()));
      break;
    case kBF16:
      for (int64_t i = 0; i < codes / 2; ++i) put(m.codes, i, float_to_bf16(numbers.next()));
      break;
    default:
      for (int64_t i = 0; i < codes; ++i) put(m.codes, i, static_cast<uint8_t>(below(256)));
  }
  if (format == kF8E4M3 || format == kFp8Block) {
    for (uint8_t& code : m.codes) code = e4m3_is_nan(code) ? 0 : code;
  }
  if (format == kNvfp4) {
    for (int64_t i = 0; i < scales; ++i) put(m.scales, i, static_cast<uint8_t>(0x08 + below(0x18)));
  } else if (format == kMxfp4) {
    for (int64_t i = 0; i < scales; ++i) put(m.scales, i, static_cast<uint8_t>(116 + below(8)));
  } else if (format == kQ4) {
    for (int64_t i = 0; i < scales / 2; ++i) put(m.scales, i, float_to_f16(numbers.next() * 0x1p-7f));
  } else if (format == kFp8Block) {
    for (int64_t i = 0; i < scales / 4; ++i) put(m.scales, i, numbers.next() * 0x1p-7f);
  } else if (format == kF8E4M3) {
    m.matrix.tensor_scale = 0x1p-8f;
  }
  m.matrix.codes = m.codes.data();
  m.matrix.scales = m.scales.empty() ? nullptr : m.scales.data();
  return m;
}

// The output of one expert_ffn on `ops`, brought to the host.
Result<std::vector<float>> run(Ops& ops, const std::vector<HostMatrix>& matrices, const std::vector<float>& x,
                               const std::vector<int32_t>& ids, const std::vector<float>& weights) {
  const int64_t tokens = std::ssize(ids) / kChosen, rows = std::ssize(ids);
  std::vector<ExpertWeights> experts(kExperts);
  for (size_t e = 0; e < experts.size(); ++e) {
    experts[e] = {matrices[3 * e].matrix, matrices[3 * e + 1].matrix, matrices[3 * e + 2].matrix};
  }
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<PlacedExperts> placed,
                          ops.place_experts(experts, ExpertsOf::kSelfTest));
  const std::array<int64_t, 8> counts = {
      tokens * kWidth,     rows,          rows,           rows * kWidth, rows * kExpertWidth,
      rows * kExpertWidth, rows * kWidth, tokens * kWidth};
  std::array<Buffer, 8> buffers;
  for (size_t i = 0; i < buffers.size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(buffers[i], Buffer::allocate(ops.memory(), counts[i] * 4, "self-test"));
  }
  auto [d_x, d_ids, d_weights, d_gathered, d_gate, d_up, d_down, d_out] = [&] {
    std::array<float*, 8> p;
    for (size_t i = 0; i < p.size(); ++i) p[i] = buffers[i].as<float>();
    return p;
  }();
  ops.memory().upload(d_x, x.data(), counts[0] * 4);
  ops.memory().upload(d_ids, ids.data(), counts[1] * 4);
  ops.memory().upload(d_weights, weights.data(), counts[2] * 4);
  ops.expert_ffn({.x = {d_x, tokens, kWidth},
                  .ids = {reinterpret_cast<int32_t*>(d_ids), tokens, kChosen},
                  .weights = {d_weights, tokens, kChosen},
                  .experts = *placed,
                  .scratch = {.gathered = {d_gathered, rows, kWidth},
                              .gate = {d_gate, rows, kExpertWidth},
                              .up = {d_up, rows, kExpertWidth},
                              .down = {d_down, rows, kWidth}},
                  .out = {d_out, tokens, kWidth}});
  std::vector<float> out(static_cast<size_t>(counts[7]));
  ops.memory().download(out.data(), d_out, counts[7] * 4);
  return out;
}

}  // namespace

Status self_test(Ops& ops) {
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<Ops> reference, make_backend("reference", {.threads = 1}));
  const double tolerance = ops.rounds_activations() ? kRoundedTolerance : kTolerance;
  for (MatrixFormat format : kFormats) {
    Numbers numbers;
    std::vector<HostMatrix> matrices;
    for (int64_t e = 0; e < kExperts; ++e) {
      matrices.push_back(make_matrix(format, kExpertWidth, kWidth, numbers));
      matrices.push_back(make_matrix(format, kExpertWidth, kWidth, numbers));
      matrices.push_back(make_matrix(format, kWidth, kExpertWidth, numbers));
    }
    const bool many = format == kNvfp4 || format == kMxfp4 || format == kQ4;
    const std::vector<size_t> steps =
        many ? std::vector<size_t>{kManyTokens, kTokens} : std::vector<size_t>{kTokens};
    const size_t tokens = steps.front();  // of the others the first
    std::vector<float> x(tokens * kWidth), weights(tokens * kChosen);
    for (float& value : x) value = numbers.next();
    for (float& value : weights) value = numbers.next();
    constexpr std::array<int32_t, 10> kIds = {0, 1, 3, 0, 1, 0, 0, 3, 3, 1};  // expert 2 has no row
    std::vector<int32_t> ids(tokens * kChosen);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = kIds[i % kIds.size()];
    NIBBLE_ASSIGN_OR_RETURN(std::vector<float> wanted, run(*reference, matrices, x, ids, weights));
    double largest = 0, worst = 0;
    for (float value : wanted) largest = std::max(largest, std::fabs(static_cast<double>(value)));
    for (size_t first : steps) {
      x.resize(first * kWidth), ids.resize(first * kChosen), weights.resize(first * kChosen);
      NIBBLE_ASSIGN_OR_RETURN(std::vector<float> found, run(ops, matrices, x, ids, weights));
      for (size_t i = 0; i < found.size(); ++i) {
        double error = std::fabs(static_cast<double>(found[i]) - wanted[i]);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
    if (!(worst <= tolerance * largest)) {
      return internal_error(
          "self-test of device '{}' failed: expert_ffn in {} is off by {:.2e} of {:.2e}; try "
          "--device reference and report this machine ({})",
          ops.name(), matrix_format_name(format), worst, largest, ops.description());
    }
  }
  return {};
}

}  // namespace nibble
