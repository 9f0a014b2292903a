// Which kernels run, and the vector functions that no operation shows alone.
#include <set>
#include <sstream>

#include "ops/backends.h"
#include "ops/cpu/tasks.h"

namespace nibble::testing {
namespace {

TEST(Isa, TheForcedOneRuns) {
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    std::unique_ptr<OnHostData> ops = make_ops({"cpu", kernels->isa});
    EXPECT_NE(ops->ops().description().find("cpu (" + std::string(kernels->isa) + ")"), std::string::npos)
        << ops->ops().description();
    EXPECT_EQ(ops->ops().name(), "cpu");
    EXPECT_EQ(cpu::find_kernels(kernels->isa).value(), kernels);
  }
  EXPECT_EQ(cpu::find_kernels("").value(), cpu::usable_kernels().front());
  EXPECT_STREQ(cpu::usable_kernels().back()->isa, "generic");
}

TEST(Isa, TheBackendSaysWhatItChoseAndWhy) {
  std::string have;
  for (const cpu::Kernels* kernels : cpu::usable_kernels())
    have += (have.empty() ? "" : ", ") + std::string(kernels->isa);
  EXPECT_EQ(make_ops({"cpu", ""})->ops().choices().front(),
            "kernels: " + std::string(cpu::usable_kernels().front()->isa) +
                ", the first that machine and build have of " + have);
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    const std::string isa = kernels->isa;
    auto lines_of = [&](const char* activations, bool host_weights) {
      const std::unique_ptr<OnHostData> ops = make_ops({"cpu", isa, activations});
      if (host_weights) {
        EXPECT_TRUE(ops->ops().use_host_weights());
      }
      return ops->ops().choices();
    };
    auto into_nvfp4 = [&](const std::vector<std::string>& lines) {
      for (const std::string& line : lines) {
        if (line.find(" NVFP4") != std::string::npos) return line;
      }
      return std::string();
    };
    const std::vector<std::string> exact = lines_of("exact", false), int8 = lines_of("int8", false);
    EXPECT_EQ(exact.front(), "kernels: " + isa + ", as asked; machine and build have " + have);
    EXPECT_TRUE(into_nvfp4(exact).starts_with("activations as integers of 23 bits into weights in NVFP4, "));
    EXPECT_TRUE(into_nvfp4(int8).starts_with("activations as integers of 8 bits into weights in NVFP4, "));
    EXPECT_TRUE(into_nvfp4(lines_of("exact", true)).ends_with(", decoded for each product"));
    const std::string pairs = "activations as bfloat16 into weights in BF16";
    EXPECT_EQ(std::count(int8.begin(), int8.end(), pairs), kernels->has_pairs ? 1 : 0);
    EXPECT_EQ(std::count(exact.begin(), exact.end(), pairs), 0);
    // Each format once.
    std::multiset<std::string> named, formats;
    for (const MatrixFormatInfo& info : matrix_formats()) formats.emplace(info.name);
    for (size_t i = 1; i < exact.size(); ++i) {
      const size_t in = exact[i].find("weights in ") + 11, end = exact[i].find(", decoded");
      std::istringstream words(exact[i].substr(in, end - in));
      for (std::string word; std::getline(words >> std::ws, word, ',');) named.insert(word);
    }
    EXPECT_EQ(named, formats);
  }
}

TEST(Isa, EveryTableIsCompleteAndItsOwn) {
  std::vector<const cpu::Kernels*> tables = cpu::usable_kernels();
  for (size_t i = 0; i < tables.size(); ++i) {
    const cpu::Kernels& k = *tables[i];
    EXPECT_TRUE(k.pack && k.linear && k.gate_up && k.attend && k.rms_norm && k.rope && k.rope_interleaved &&
                k.activate && k.add && k.add_scaled && k.softplus && k.multiply && k.multiply_by && k.exp);
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE(k.linear, tables[j]->linear) << k.isa << " and " << tables[j]->isa;
      EXPECT_NE(k.exp, tables[j]->exp);
    }
  }
}

TEST(Isa, AnUnknownOneIsAUserErrorThatNamesThoseThatExist) {
  BackendOptions options;
  options.threads = 1;
  options.cpu_isa = "mmx";
  Result<std::unique_ptr<Ops>> ops = make_backend("cpu", options);
  ASSERT_FALSE(ops.ok());
  EXPECT_EQ(ops.status().code(), ErrorCode::kUser);
  EXPECT_NE(ops.status().message().find("mmx"), std::string::npos);
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    EXPECT_NE(ops.status().message().find(kernels->isa), std::string::npos) << ops.status().message();
  }
}

// AVX2 and AVX-512 have FMA and the same lane order.
TEST(Isa, FmaKernelsAgreeBitForBit) {
  Random random(51);
  for (MatrixFormat format : kFormats) {
    const int64_t k = columns_for(format, 1168);
    TestMatrix w(random, format, 50, k);
    RowsBuffer x = RowsBuffer::random(random, 9, k);
    std::vector<RowsBuffer> results;
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      if (std::string(kernels->isa) == "generic") continue;
      results.emplace_back(9, 50);
      make_ops({"cpu", kernels->isa})->linear(x.view(), w.matrix, results.back().view());
    }
    for (const RowsBuffer& result : results)
      EXPECT_TRUE(same_bits(result.read(), results.front().read())) << matrix_format_name(format);
  }
}

// Sums of integers, and products and sums that are rounded apart: no instruction set does otherwise.
TEST(Isa, WeightsInTilesGiveTheSameBitsOnAll) {
  Random random(52);
  using enum MatrixFormat;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4}) {
    for (int64_t k : {32, 224, 1184}) {
      TestMatrix w(random, format, 50, k, 0.3f);
      RowsBuffer x = RowsBuffer::random(random, 19, k);
      for (int64_t i = 0; i < k; ++i) x.view().row(3)[i] *= std::exp2(static_cast<float>(i % 60) - 30);
      for (const char* activations : {"exact", "int8"}) {
        std::vector<RowsBuffer> results;
        for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
          results.emplace_back(19, 50);
          make_ops({"cpu", kernels->isa, activations})->linear(x.view(), w.matrix, results.back().view());
          EXPECT_TRUE(same_bits(results.back().read(), results.front().read()))
              << kernels->isa << ", " << matrix_format_name(format) << ", K " << k << ", " << activations;
        }
      }
    }
  }
}

// Rows are cut into tiles of other heights for each number of them, and by other kernels where they are many.
TEST(Isa, WeightsInTilesGiveTheSameBitsForAnyNumberOfRows) {
  Random random(55);
  using enum MatrixFormat;
  constexpr int64_t kRows = 131, kN = 146, kK = 352;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4}) {
    TestMatrix w(random, format, kN, kK, 0.3f);
    RowsBuffer x = RowsBuffer::random(random, kRows, kK);
    for (int64_t i = 0; i < kK; ++i) x.view().row(3)[i] *= std::exp2(static_cast<float>(i % 60) - 30);
    x.view().row(5)[kK - 1] = INFINITY;
    x.view().row(130)[7] = kNaN;
    for (const char* activations : {"exact", "int8"}) {
      RowsBuffer wanted(kRows, kN);
      make_ops({"cpu", "generic", activations})->linear(x.view(), w.matrix, wanted.view());
      for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
        const std::unique_ptr<OnHostData> ops = make_ops({"cpu", kernels->isa, activations});
        for (int64_t rows = 1; rows <= kRows; rows += rows < 50 ? 1 : 27) {
          RowsBuffer out(rows, kN);
          ops->linear({x.view().data, rows, kK, x.view().stride}, w.matrix, out.view());
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t n = 0; n < kN; ++n) {
              const float found = out.read().row(r)[n], right = wanted.read().row(r)[n];
              ASSERT_TRUE(same_bits(&found, &right, 1) || (std::isnan(found) && std::isnan(right)))
                  << kernels->isa << ", " << matrix_format_name(format) << ", " << activations << ", " << rows
                  << " rows: " << r << ", " << n << ": " << found << " and " << right;
            }
          }
        }
      }
    }
  }
}

// The same on other machines: what one of each kind gave (x86-64 and aarch64), from data that every one draws
// alike.
TEST(Isa, WeightsInTilesGiveTheSameBitsOnEveryMachine) {
  using enum MatrixFormat;
  constexpr int64_t kRows = 9, kN = 50, kK = 416;
  struct Hashes {
    MatrixFormat format;
    uint32_t exact, int8;
  };
  for (auto [format, exact, int8] : {Hashes{kNvfp4, 3758981964u, 929734913u},
                                     {kMxfp4, 4043799169u, 869193076u},
                                     {kQ4, 1834878857u, 2542734936u}}) {
    Random random(53);
    std::mt19937& draw = random.engine();
    TestMatrix w(random, format, kN, kK, 0.3f);
    draw.seed(53);
    for (uint8_t& code : w.codes) code = static_cast<uint8_t>(draw() & 255u);
    for (size_t i = 0; i < w.scales.size(); ++i) {
      // e4m3 of both signs without NaN; e8m0 around 1; float16 of up to 2.
      const uint32_t bits = draw();
      if (format == kNvfp4) w.scales[i] = static_cast<uint8_t>(bits & 0xF7u);
      if (format == kMxfp4) w.scales[i] = static_cast<uint8_t>(110 + bits % 30);
      if (format == kQ4) w.scales[i] = static_cast<uint8_t>(bits & (i % 2 == 0 ? 0xFFu : 0x3Fu));
    }
    RowsBuffer x(kRows, kK);
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t i = 0; i < kK; ++i) {
        const auto fraction = static_cast<float>(static_cast<int32_t>(draw()) >> 8);
        x.view().row(t)[i] = std::ldexp(fraction, -static_cast<int>(draw() % 40));
      }
    }
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      for (auto [activations, wanted] : {std::pair{"exact", exact}, {"int8", int8}}) {
        RowsBuffer out(kRows, kN);
        make_ops({"cpu", kernels->isa, activations})->linear(x.view(), w.matrix, out.view());
        uint32_t hash = 2166136261u;  // FNV-1a
        for (int64_t t = 0; t < kRows; ++t) {
          for (int64_t n = 0; n < kN; ++n)
            hash = (hash ^ std::bit_cast<uint32_t>(out.read().row(t)[n])) * 16777619u;
        }
        EXPECT_EQ(hash, wanted) << kernels->isa << ", " << matrix_format_name(format) << ", " << activations;
      }
    }
  }
}

// Squares beyond float32's range.
TEST(Rows, NormsOfLargeRowsAreNotZero) {
  Random random(54);
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    for (int64_t n : {1, 17, 400}) {
      for (int exponent : {63, 64, 90, 120}) {
        std::vector<float> x = random.floats(n), weight = random.floats(n), out(static_cast<size_t>(n));
        double sum = 0;
        for (float& value : x) {
          value = std::ldexp(value, exponent);
          sum += static_cast<double>(value) * value;
        }
        kernels->rms_norm(x.data(), weight.data(), 1e-6f, n, out.data());
        const double scale = 1 / std::sqrt(sum / static_cast<double>(n));
        for (size_t i = 0; i < x.size(); ++i) {
          const double wanted = x[i] * scale * weight[i];
          ASSERT_NEAR(out[i], wanted, (static_cast<double>(n) / 16 + 10) * kEpsilon * std::fabs(wanted))
              << kernels->isa << ", 2^" << exponent << ", " << n << " columns";
        }
      }
    }
    float endless[2] = {INFINITY, 1}, ones[2] = {1, 1}, out[2];
    kernels->rms_norm(endless, ones, 1e-6f, 2, out);
    EXPECT_TRUE(std::isnan(out[0])) << kernels->isa;
  }
}

double ulp(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Every 97th float: 44 million would take a minute.
TEST(VectorMath, ExpIsWithinTwoUlp) {
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    double worst = 0;
    std::vector<float> x, y;
    for (uint32_t bits = 0; bits < 0x43000000u; bits += 1499) {  // up to 128
      x.push_back(std::bit_cast<float>(bits));
      x.push_back(-x.back());
    }
    y.resize(x.size());
    kernels->exp(x.data(), static_cast<int64_t>(x.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      double wanted = std::exp(static_cast<double>(x[i]));
      if (static_cast<float>(wanted) == INFINITY) {
        EXPECT_EQ(y[i], INFINITY) << x[i];
        continue;
      }
      worst = std::max(worst, std::fabs(y[i] - wanted) / ulp(wanted));
    }
    EXPECT_LE(worst, 2.0) << kernels->isa;
    RecordProperty(std::string("exp_ulp_") + kernels->isa, std::to_string(worst));
    float ends[4] = {INFINITY, -INFINITY, kNaN, 0}, out[4];
    kernels->exp(ends, 4, out);
    EXPECT_EQ(out[0], INFINITY);
    EXPECT_EQ(out[1], 0.0f);
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], 1.0f);
  }
}

TEST(Tasks, CoverTheirRowsWithinBounds) {
  for (int threads : {1, 2, 16, 128}) {
    for (int64_t n : {1, 3, 4, 130, 4096, 100000}) {
      for (int64_t row_bytes : {9, 2304, 16384, 1 << 20}) {
        for (int64_t rows : {1, 8, 512}) {
          for (int64_t unit : {4, 128}) {
            int64_t each = cpu::weight_rows_per_task(n, n, row_bytes, rows, threads, unit);
            EXPECT_TRUE(each >= 1 && each <= n);
            EXPECT_TRUE(each % unit == 0 || each == n) << each;
            EXPECT_TRUE(each <= unit || each * row_bytes <= (256 << 10) + unit * row_bytes);
          }
        }
      }
    }
  }
  // A large matrix: at least four tasks a thread.
  EXPECT_LE(cpu::weight_rows_per_task(4096, 4096, 2304, 1, 8, 16), 4096 / (4 * 8));
}

}  // namespace
}  // namespace nibble::testing
