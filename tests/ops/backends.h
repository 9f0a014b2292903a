// What all tests of operations share: the backends of this machine, random data, a judge.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "base/numbers.h"
#include "gpu.h"
#include "ops/backend.h"
#include "ops/cpu/isa.h"
#include "ops/on_host_data.h"
#include "quant/float_codes.h"
#include "quant/nvfp4.h"

namespace nibble::testing {

struct BackendCase {
  std::string name;     // for make_backend
  std::string variant;  // of cpu the instruction set, of cuda whether it takes tensor cores
  std::string cpu_activations = "exact";

  // Products on tensor cores: nearly as exact as float32, but not its bits.
  bool tensor_cores() const { return name == "cuda" && variant.empty(); }
};

inline std::ostream& operator<<(std::ostream& out, const BackendCase& backend) {
  return out << backend.name << " " << backend.variant;
}

inline std::vector<BackendCase> all_backends() {
  std::vector<BackendCase> cases = {{"reference", ""}};
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) cases.push_back({"cpu", kernels->isa});
  if (gpu_status().ok()) {
    cases.push_back({"cuda", ""});
    cases.push_back({"cuda", "off"});
  }
  return cases;
}

// The cpu's kernels with activations in 8 bits.
inline std::vector<BackendCase> int8_backends() {
  std::vector<BackendCase> cases;
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) cases.push_back({"cpu", kernels->isa, "int8"});
  return cases;
}

inline std::string case_name(const ::testing::TestParamInfo<BackendCase>& info) {
  return info.param.variant.empty() ? info.param.name : info.param.name + "_" + info.param.variant;
}

inline std::unique_ptr<OnHostData> make_ops(const BackendCase& backend, int threads = 2) {
  BackendOptions options;
  options.threads = threads;
  (backend.name == "cpu" ? options.cpu_isa : options.tensor_cores) = backend.variant;
  options.cpu_activations = backend.cpu_activations;
  return std::make_unique<OnHostData>(make_backend(backend.name, options).value());
}

// The law or accuracy holds on every backend: INSTANTIATE_ON_ALL_BACKENDS(Suite).
class OnEveryBackend : public ::testing::TestWithParam<BackendCase> {
 protected:
  std::unique_ptr<OnHostData> ops_ = make_ops(GetParam());
};
#define INSTANTIATE_ON_ALL_BACKENDS(suite) \
  INSTANTIATE_TEST_SUITE_P(All, suite, ::testing::ValuesIn(all_backends()), case_name)

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr double kEpsilon = 0x1p-24;  // unit roundoff of float32

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float normal() { return normal_(engine_); }
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine_); }
  std::vector<float> floats(int64_t n) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& x : out) x = normal();
    return out;
  }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

// A matrix of floats with rows `gap` elements further apart than their width; everything, gaps included, is
// NaN until written.
class RowsBuffer {
 public:
  RowsBuffer(int64_t rows, int64_t cols, int64_t gap = 0)
      : rows_(rows),
        cols_(cols),
        data_(static_cast<size_t>(rows * (cols + gap)), kNaN),
        stride_(cols + gap) {}
  static RowsBuffer random(Random& random, int64_t rows, int64_t cols, int64_t gap = 0) {
    RowsBuffer out(rows, cols, gap);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) out.view().row(r)[c] = random.normal();
    }
    return out;
  }
  RowsBuffer with_gap(int64_t gap) const {
    RowsBuffer out(rows_, cols_, gap);
    for (int64_t r = 0; r < rows_; ++r) std::copy_n(view().row(r), cols_, out.view().row(r));
    return out;
  }
  Rows<float> view() { return {data_.data(), rows_, cols_, stride_}; }
  Rows<const float> view() const { return {data_.data(), rows_, cols_, stride_}; }
  Rows<const float> read() const { return view(); }
  // What lies between the rows is still untouched.
  bool gaps_untouched() const {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = cols_; c < stride_; ++c) {
        if (!std::isnan(data_[static_cast<size_t>(r * stride_ + c)])) return false;
      }
    }
    return true;
  }

 private:
  int64_t rows_, cols_;
  std::vector<float> data_;
  int64_t stride_;
};

inline bool same_bits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}
inline ::testing::AssertionResult same_bits(Rows<const float> a, Rows<const float> b) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      if (same_bits(a.row(r) + c, b.row(r) + c, 1)) continue;
      return ::testing::AssertionFailure()
             << "row " << r << ", column " << c << ": " << a.row(r)[c] << " and " << b.row(r)[c];
    }
  }
  return ::testing::AssertionSuccess();
}

// Compares with tolerances that a test computes for each value from norms and the unit roundoff, and keeps
// the largest share of one that was used. A share above 1, or any NaN, fails.
class Judge {
 public:
  explicit Judge(std::string what) : what_(std::move(what)) {}
  ~Judge() { ::testing::Test::RecordProperty(what_ + "_share_of_tolerance", std::to_string(share_)); }
  Judge(const Judge&) = delete;
  Judge& operator=(const Judge&) = delete;

  void check(float found, double wanted, double tolerance, const std::string& where) {
    double error = std::fabs(static_cast<double>(found) - wanted);
    double share = error == 0 ? 0 : error / tolerance;
    if (!(share <= 1) && failures_++ < 5) {
      ADD_FAILURE() << what_ << " " << where << ": wanted " << wanted << ", found " << found << ", which is "
                    << share << " of the tolerance " << tolerance;
    }
    if (share > share_) share_ = share;
  }
  double share() const { return share_; }

 private:
  std::string what_;
  double share_ = 0;
  int failures_ = 0;
};

// A random matrix of any format with its bytes.
struct TestMatrix {
  std::vector<uint8_t> codes, scales;
  Matrix matrix;

  TestMatrix(Random& random, MatrixFormat format, int64_t n, int64_t k, float tensor_scale = 1.0f) {
    matrix = {format, n, k, nullptr, nullptr, tensor_scale};
    codes.resize(static_cast<size_t>(matrix_code_bytes(format, n, k)));
    scales.resize(static_cast<size_t>(matrix_scale_bytes(format, n, k)));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(256));
    switch (format) {
      case MatrixFormat::kF32:
        for (int64_t i = 0; i < n * k; ++i) put(codes, i * 4, random.normal());
        break;
      case MatrixFormat::kF16:
        for (int64_t i = 0; i < n * k; ++i) put(codes, i * 2, float_to_f16(random.normal()));
        break;
      case MatrixFormat::kBF16:
        for (int64_t i = 0; i < n * k; ++i) put(codes, i * 2, float_to_bf16(random.normal()));
        break;
      case MatrixFormat::kNvfp4:
        // Scales from 2^-6 (subnormal codes among them) to 2, both signs.
        for (uint8_t& scale : scales)
          scale = static_cast<uint8_t>(random.below(0x40) | (random.below(8) == 0 ? 0x80 : 0));
        break;
      case MatrixFormat::kMxfp4:
        for (uint8_t& scale : scales) scale = exponent(random);
        break;
      case MatrixFormat::kQ4:
        for (size_t i = 0; i < scales.size(); i += 2)
          put(scales, static_cast<int64_t>(i), float_to_f16(random.normal()));
        break;
      case MatrixFormat::kFp8Block:
        for (size_t i = 0; i < scales.size(); i += 4) put(scales, static_cast<int64_t>(i), random.normal());
        [[fallthrough]];
      case MatrixFormat::kF8E4M3:
        for (uint8_t& code : codes) code = e4m3_is_nan(code) ? 0 : code;
        break;
      case MatrixFormat::kGgufQ4_0:
      case MatrixFormat::kGgufQ8_0:
        put_halves(random, {0});
        break;
      case MatrixFormat::kGgufQ4_1:
      case MatrixFormat::kGgufQ4K:
        put_halves(random, {0, 2});
        break;
      case MatrixFormat::kGgufQ6K:
        put_halves(random, {208});
        break;
      case MatrixFormat::kGgufMxfp4:
        for (size_t i = 0; i < codes.size(); i += 17) codes[i] = exponent(random);
        break;
      case MatrixFormat::kGgufNvfp4:
        for (size_t i = 0; i < codes.size(); ++i) {
          if (i % 36 < 4) codes[i] = static_cast<uint8_t>(random.below(0x40));
        }
        break;
    }
    point();
  }
  TestMatrix(const TestMatrix& other) : codes(other.codes), scales(other.scales), matrix(other.matrix) {
    point();
  }
  TestMatrix(TestMatrix&& other) noexcept = default;  // a moved vector keeps its bytes in place
  TestMatrix& operator=(const TestMatrix&) = delete;

 private:
  template <class T>
  static void put(std::vector<uint8_t>& bytes, int64_t at, T value) {
    std::memcpy(bytes.data() + at, &value, sizeof(value));
  }
  // e8m0 from 2^-15 to 2.
  static uint8_t exponent(Random& random) { return static_cast<uint8_t>(112 + random.below(17)); }
  // The f16 numbers at these places of each GGUF block.
  void put_halves(Random& random, std::initializer_list<int64_t> places) {
    for (int64_t block = 0; block < std::ssize(codes);
         block += matrix_format_info(matrix.format).group_bytes) {
      for (int64_t place : places) put(codes, block + place, float_to_f16(random.normal()));
    }
  }
  void point() {
    matrix.codes = codes.data();
    matrix.scales = scales.empty() ? nullptr : scales.data();
  }
};

inline constexpr MatrixFormat kFormats[] = {
    MatrixFormat::kF32,      MatrixFormat::kF16,       MatrixFormat::kBF16,     MatrixFormat::kNvfp4,
    MatrixFormat::kMxfp4,    MatrixFormat::kQ4,        MatrixFormat::kF8E4M3,   MatrixFormat::kFp8Block,
    MatrixFormat::kGgufQ4_0, MatrixFormat::kGgufQ4_1,  MatrixFormat::kGgufQ8_0, MatrixFormat::kGgufQ4K,
    MatrixFormat::kGgufQ6K,  MatrixFormat::kGgufMxfp4, MatrixFormat::kGgufNvfp4};

// The smallest number of columns from k that the format can have.
inline int64_t columns_for(MatrixFormat format, int64_t k) {
  return round_up(k, matrix_format_info(format).group);
}

// The law that a row's product with a matrix [37, k] is the same alone and in chunks of any size.
inline void expect_rows_alone(OnHostData& ops, Random& random, MatrixFormat format, int64_t k) {
  constexpr int64_t kRows = 130;
  const TestMatrix w(random, format, 37, k, 0.5f);
  const RowsBuffer all = RowsBuffer::random(random, kRows, k);
  // The last chunk may be shorter.
  auto in_chunks = [&](int64_t rows) {
    RowsBuffer out(kRows, w.matrix.n);
    for (int64_t t = 0; t < kRows; t += rows) {
      const int64_t count = std::min(rows, kRows - t);
      ops.linear(all.read().slice(t, count), w.matrix, out.view().slice(t, count));
    }
    return out;
  };
  const RowsBuffer alone = in_chunks(1);
  for (int64_t rows : {2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33, 128, 129, 130}) {
    EXPECT_TRUE(same_bits(in_chunks(rows).read(), alone.read()))
        << matrix_format_name(format) << ", K " << k << ", rows " << rows;
  }
}

}  // namespace nibble::testing
