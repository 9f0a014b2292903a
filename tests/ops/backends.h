// What all tests of operations share: the backends of this machine, random data, a judge.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "ops/backend.h"
#include "ops/cpu/isa.h"
#include "quant/float_codes.h"
#include "quant/nvfp4.h"

namespace nibble::testing {

struct BackendCase {
  std::string name;  // for make_backend
  std::string isa;   // cpu only
};

inline std::ostream& operator<<(std::ostream& out, const BackendCase& backend) {
  return out << backend.name << " " << backend.isa;
}

inline std::vector<BackendCase> all_backends() {
  std::vector<BackendCase> cases = {{"reference", ""}};
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) cases.push_back({"cpu", kernels->isa});
  return cases;
}

inline std::string case_name(const ::testing::TestParamInfo<BackendCase>& info) {
  return info.param.isa.empty() ? info.param.name : info.param.name + "_" + info.param.isa;
}

inline std::unique_ptr<Ops> make_ops(const BackendCase& backend, int threads = 2) {
  BackendOptions options;
  options.threads = threads;
  options.cpu_isa = backend.isa;
  return make_backend(backend.name, options).value();
}

// The law or accuracy holds on every backend: INSTANTIATE_ON_ALL_BACKENDS(Suite).
class OnEveryBackend : public ::testing::TestWithParam<BackendCase> {
 protected:
  std::unique_ptr<Ops> ops_ = make_ops(GetParam());
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
    if (format == MatrixFormat::kNvfp4) {
      codes.resize(static_cast<size_t>(n * k / 2));
      scales.resize(static_cast<size_t>(n * k / nvfp4::kGroup));
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(256));
      // Scales from 2^-6 (subnormal codes among them) to 2, both signs.
      for (uint8_t& scale : scales)
        scale = static_cast<uint8_t>(random.below(0x40) | (random.below(8) == 0 ? 0x80 : 0));
    } else {
      const int64_t bytes = format == MatrixFormat::kF32 ? 4 : 2;
      codes.resize(static_cast<size_t>(n * k * bytes));
      for (int64_t i = 0; i < n * k; ++i) {
        float value = random.normal();
        uint16_t half = format == MatrixFormat::kF16 ? float_to_f16(value) : float_to_bf16(value);
        std::memcpy(codes.data() + i * bytes, bytes == 4 ? static_cast<void*>(&value) : &half,
                    static_cast<size_t>(bytes));
      }
    }
    point();
  }
  TestMatrix(const TestMatrix& other) : codes(other.codes), scales(other.scales), matrix(other.matrix) {
    point();
  }
  TestMatrix(TestMatrix&& other) noexcept = default;  // a moved vector keeps its bytes in place
  TestMatrix& operator=(const TestMatrix&) = delete;

 private:
  void point() {
    matrix.codes = codes.data();
    matrix.scales = scales.empty() ? nullptr : scales.data();
  }
};

inline constexpr MatrixFormat kFormats[] = {MatrixFormat::kF32, MatrixFormat::kF16, MatrixFormat::kBF16,
                                            MatrixFormat::kNvfp4};

}  // namespace nibble::testing
