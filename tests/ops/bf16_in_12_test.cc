// BF16 weights in 12 bits: the codes as their description says, and the bits of products with plain BF16.
#include "ops/cpu/bf16_in_12.h"

#include "ops/backends.h"

namespace nibble::testing {
namespace {

using Codes = std::vector<uint16_t>;

Matrix matrix_of(const Codes& codes, int64_t n, int64_t k) {
  return {.format = MatrixFormat::kBF16, .n = n, .k = k, .codes = codes.data(), .tensor_scale = 0.37f};
}

// Normal numbers, whose exponents nearly always lie close.
Codes trained(Random& random, int64_t n, int64_t k) {
  Codes codes(static_cast<size_t>(n * k));
  for (uint16_t& code : codes) code = float_to_bf16(0.02f * random.normal());
  return codes;
}

// Some of everything that no window holds, in as few runs as can be.
void plant_exceptions(Codes& codes, int64_t n, int64_t k) {
  const uint16_t kinds[] = {0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFC0, 0x0001, 0x807F, 0x5000, 0xD000};
  for (size_t i = 0; i < std::size(kinds); ++i) {
    const int64_t row = static_cast<int64_t>(i) / 2 * 3 % n;  // those that are no numbers apart from others
    codes[static_cast<size_t>(row * k) + i * 7] = kinds[i];
  }
  codes.back() = 0x8000;  // in what may be a run with filling
}

struct Placed {
  std::vector<uint8_t> bytes;
  int64_t marked = 0;
};
// In pieces of rows, as tasks do it.
Placed in_12(const Matrix& m, int64_t piece) {
  std::vector<int64_t> before;
  Placed out;
  for (int64_t n = 0; n < m.n; n += piece) {
    before.push_back(out.marked);
    out.marked += cpu::count_marked_runs(m, n, std::min(m.n, n + piece));
  }
  out.bytes.assign(static_cast<size_t>(cpu::bytes_in_12(m.n, m.k, out.marked)), 0xEE);
  for (int64_t n = 0; n < m.n; n += piece)
    cpu::put_in_12(m, n, std::min(m.n, n + piece), before[static_cast<size_t>(n / piece)], out.bytes.data());
  return out;
}

uint16_t word(const uint8_t* bytes, int64_t i) {
  uint16_t out = 0;
  std::memcpy(&out, bytes + 2 * i, sizeof(out));
  return out;
}

// Column k of row n, at the place that bf16_in_12.h describes; columns behind the last are filling.
uint16_t read_code(const Placed& placed, int64_t n, int64_t k, int64_t rows, int64_t columns) {
  const int64_t run = n * ((columns + 127) / 128) + k / 128, unit = k % 128 / 32;
  const int64_t at = k % 16 * 2 + k % 32 / 16;  // of the 32 words
  const uint8_t* bytes = placed.bytes.data() + run * 192;
  uint32_t base = 0;
  std::memcpy(&base, placed.bytes.data() + cpu::bases_offset(rows, columns) + run * 4, sizeof(base));
  if (base == 0xFFFFFFFF) {
    int64_t distance = 0;
    std::memcpy(&distance, bytes, sizeof(distance));
    return word(bytes + distance, unit * 32 + at);
  }
  uint32_t code = 0;  // sign, exponent above the base, mantissa
  if (unit < 3) {
    code = word(bytes, unit * 32 + at) & 0x87FFu;
  } else {
    const uint32_t a = word(bytes, at) >> 11, b = word(bytes, 32 + at) >> 11, c = word(bytes, 64 + at) >> 11;
    code = (c & 1) << 15 | (a & 15) << 7 | (b & 15) << 3 | (c >> 1 & 7);
  }
  EXPECT_EQ(base & 0xFFFF, base >> 16);
  return static_cast<uint16_t>(code + (base & 0xFFFF));
}

TEST(Bf16In12, HoldsEveryCodeWhereTheDescriptionSays) {
  Random random(91);
  for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {3, 128}, {5, 200}, {16, 1000}, {7, 130}}) {
    for (int kind = 0; kind < 3; ++kind) {
      Codes codes = trained(random, n, k);
      if (kind == 1 && k > 100) plant_exceptions(codes, n, k);
      if (kind == 2) {  // any codes, and runs of one exponent, whichever
        for (size_t i = 0; i < codes.size(); ++i) {
          const int64_t exponent = static_cast<int64_t>(i) / k % 2 == 0 ? random.below(256) : n * 50 % 256;
          codes[i] =
              static_cast<uint16_t>((random.below(256) & 0x80) << 8 | exponent << 7 | random.below(128));
        }
      }
      for (int64_t piece : {int64_t{1}, int64_t{3}, n}) {
        const Placed placed = in_12(matrix_of(codes, n, k), piece);
        for (int64_t row = 0; row < n; ++row) {
          for (int64_t c = 0; c < (k + 127) / 128 * 128; ++c) {
            const uint16_t code = read_code(placed, row, c, n, k);
            if (c < k) {
              ASSERT_EQ(code, codes[static_cast<size_t>(row * k + c)]) << "row " << row << ", column " << c;
            } else {
              ASSERT_TRUE(std::isfinite(bf16_to_float(code)));
            }
          }
        }
      }
    }
  }
}

// A window of 16 exponents, at its ends: whatever the base.
TEST(Bf16In12, MarksNoMoreThanItMust) {
  for (int exponent = 0; exponent < 256; ++exponent) {
    for (int span : {0, 1, 15, 16, 200}) {
      if (exponent + span > 255) continue;
      Codes codes(128, static_cast<uint16_t>(exponent << 7 | 5));
      codes[77] = static_cast<uint16_t>(0x8000 | (exponent + span) << 7 | 0x7F);
      const int64_t marked = cpu::count_marked_runs(matrix_of(codes, 1, 128), 0, 1);
      EXPECT_EQ(marked, span > 15 || exponent + span == 255 ? 1 : 0)
          << exponent << " and " << span << " more";
    }
  }
}

TEST(Bf16In12, PaysWhereItSavesBytes) {
  // 196 bytes for 256, and 256 more where marked; three of 16 must be saved.
  EXPECT_TRUE(cpu::pays_in_12(1000, 1280, 0));
  EXPECT_TRUE(cpu::pays_in_12(1000, 1280, 460));
  EXPECT_FALSE(cpu::pays_in_12(1000, 1280, 480));
  EXPECT_FALSE(cpu::pays_in_12(1000, 192, 0));
  EXPECT_TRUE(cpu::pays_in_12(1000, 4100, 0));
}

// Equal bits; of numbers that are none, that they are none.
::testing::AssertionResult same_values(Rows<const float> a, Rows<const float> b) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      const float *found = a.row(r) + c, *wanted = b.row(r) + c;
      if ((std::isnan(*found) && std::isnan(*wanted)) || same_bits(found, wanted, 1)) continue;
      return ::testing::AssertionFailure()
             << "row " << r << ", column " << c << ": " << *found << " and " << *wanted;
    }
  }
  return ::testing::AssertionSuccess();
}

struct Case {
  std::string isa, activations;
  int threads;
};
std::vector<Case> cases() {
  std::vector<Case> out;
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    for (const char* activations : {"exact", "int8"}) {
      for (int threads : {1, 2, 3}) out.push_back({kernels->isa, activations, threads});
    }
  }
  return out;
}
bool is_in_12(const Case& c) { return c.isa.starts_with("avx512") || c.isa == "amx"; }

// The same products over the bytes as they lie.
void expect_bits_of_plain(const Case& c, const Matrix& w, Rows<const float> x, bool wants_12,
                          const std::string& where) {
  const std::unique_ptr<OnHostData> ops = make_ops({"cpu", c.isa, c.activations}, c.threads);
  const std::unique_ptr<OnHostData> plain = make_ops({"cpu", c.isa, c.activations}, c.threads);
  ASSERT_TRUE(plain->ops().use_host_weights());
  EXPECT_EQ(ops->ops().copies_weights(MatrixFormat::kBF16), is_in_12(c));
  EXPECT_EQ(ops->ops().place(w).value().tiled, is_in_12(c) && wants_12) << where;
  EXPECT_EQ(plain->ops().place(w).value().codes, w.codes);
  RowsBuffer out(x.rows, w.n, 1), wanted(x.rows, w.n, 1);
  ops->linear(x, w, out.view());
  plain->linear(x, w, wanted.view());
  EXPECT_TRUE(out.gaps_untouched());
  EXPECT_TRUE(same_values(out.read(), wanted.read()))
      << c.isa << ", " << c.activations << ", " << c.threads << " threads, " << x.rows << " rows, " << where;
}

TEST(Bf16In12, ProductsHaveTheBitsOfPlainOnes) {
  Random random(92);
  for (auto [n, k] : {std::pair<int64_t, int64_t>{40, 1000},
                      {24, 4096},
                      {130, 256},
                      {90, 998},
                      {33, 2000},
                      {50, 1001},
                      {41, 4100}}) {
    for (bool has_exceptions : {false, true}) {
      Codes codes = trained(random, n, k);
      if (has_exceptions) plant_exceptions(codes, n, k);
      const Matrix w = matrix_of(codes, n, k);
      const std::string where = "N " + std::to_string(n) + ", K " + std::to_string(k);
      const bool in_12 = cpu::pays_in_12(n, k, cpu::count_marked_runs(w, 0, n));
      EXPECT_TRUE(in_12) << where;
      const RowsBuffer x = RowsBuffer::random(random, 133, k);
      for (const Case& c : cases()) {
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 33, 70, 133}) {
          if (c.threads == 2 || rows < 5 || rows == 33)
            expect_bits_of_plain(c, w, x.read().slice(0, rows), in_12, where);
        }
      }
    }
  }
}

// Sums of -0, which filling must not turn to +0.
TEST(Bf16In12, SumsOfMinusZeroStaySo) {
  for (int64_t k : {996, 1000, 2000, 4100}) {
    const Codes codes(static_cast<size_t>(5 * k), float_to_bf16(0x1p-100f));
    RowsBuffer x(9, k);
    for (int64_t r = 0; r < 9; ++r) std::fill_n(x.view().row(r), k, -0x1p-60f);
    for (const Case& c : cases()) {
      for (int64_t rows : {1, 2, 9})
        expect_bits_of_plain(c, matrix_of(codes, 5, k), x.read().slice(0, rows), true, "-0");
    }
  }
}

TEST(Bf16In12, MatricesWithManyExceptionsStayAsTheyAre) {
  Random random(93);
  constexpr int64_t kRows = 37, kColumns = 1024;
  Codes codes = trained(random, kRows, kColumns);
  for (size_t i = 0; i < codes.size(); i += 1000) codes[i] = 0;
  const RowsBuffer x = RowsBuffer::random(random, 9, kColumns);
  for (const Case& c : cases()) {
    for (int64_t rows : {1, 9})
      expect_bits_of_plain(c, matrix_of(codes, kRows, kColumns), x.read().slice(0, rows), false, "pruned");
    const std::unique_ptr<OnHostData> ops = make_ops({"cpu", c.isa, c.activations}, c.threads);
    const Matrix placed = ops->ops().place(matrix_of(codes, kRows, kColumns)).value();
    EXPECT_EQ(placed.codes != codes.data(), is_in_12(c));  // copied: copies_weights() goes by the format
    EXPECT_EQ(std::memcmp(placed.codes, codes.data(), codes.size() * 2), 0);
  }
}

}  // namespace
}  // namespace nibble::testing
