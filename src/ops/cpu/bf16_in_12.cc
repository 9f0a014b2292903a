#include "ops/cpu/bf16_in_12.h"

#include <algorithm>
#include <cstring>

#include "base/numbers.h"
#include "ops/cpu/kernels.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kPlainRunBytes = kRunColumns * 2;
constexpr int64_t kAlign = 64;  // of runs
constexpr int64_t kUnit = 32;   // columns of 64 bytes of 16-bit words
constexpr int16_t kExponent = 0x7F80;

int64_t row_runs(int64_t k) { return ceil_div(k, kRunColumns); }

// The bits of the least and the largest exponent among columns of a run, in place.
struct Exponents {
  int16_t least, largest;
  bool fit() const { return largest - least < 16 << 7 && largest != kExponent; }
};
Exponents exponents(const uint16_t* codes, int64_t count) {
  Exponents found = {kExponent, 0};
  for (int64_t i = 0; i < count; ++i) {
    const auto exponent = static_cast<int16_t>(codes[i] & kExponent);
    found.least = std::min(found.least, exponent);
    found.largest = std::max(found.largest, exponent);
  }
  return found;
}

// words[2 i + half] = word(column 16 half + i), for 32 columns.
template <class Word>
void put_unit(uint16_t* words, const Word& word) {
  for (int64_t i = 0; i < kUnit / 2; ++i) {
    words[2 * i] = word(i);
    words[2 * i + 1] = word(kUnit / 2 + i);
  }
}

void put_run(const uint16_t* codes, uint16_t base, uint8_t* to) {
  uint16_t small[kRunColumns], words[kRunBytes / 2];
  for (int64_t i = 0; i < kRunColumns; ++i)
    small[i] = static_cast<uint16_t>((codes[i] & 0x8000) | ((codes[i] & 0x7FFF) - base));
  const uint16_t *own = small, *rest = small + 3 * kUnit;
  put_unit(words, [&](int64_t c) { return static_cast<uint16_t>(own[c] | (rest[c] & 0x0780) << 4); });
  own += kUnit;
  put_unit(words + kUnit, [&](int64_t c) { return static_cast<uint16_t>(own[c] | (rest[c] & 0x0078) << 8); });
  own += kUnit;
  put_unit(words + 2 * kUnit, [&](int64_t c) {
    return static_cast<uint16_t>(own[c] | (rest[c] & 0x0007) << 12 | (rest[c] & 0x8000) >> 4);
  });
  std::memcpy(to, words, sizeof(words));
}

void put_plain_run(const uint16_t* codes, uint8_t* to) {
  uint16_t words[kRunColumns];
  for (int64_t c = 0; c < kRunColumns; c += kUnit)
    put_unit(words + c, [&](int64_t i) { return codes[c + i]; });
  std::memcpy(to, words, sizeof(words));
}

}  // namespace

int64_t count_marked_runs(const Matrix& matrix, int64_t first, int64_t last) {
  int64_t marked = 0;
  for (int64_t n = first; n < last; ++n) {
    const uint16_t* row = static_cast<const uint16_t*>(matrix.codes) + n * matrix.k;
    for (int64_t c = 0; c < matrix.k; c += kRunColumns)
      marked += exponents(row + c, std::min(kRunColumns, matrix.k - c)).fit() ? 0 : 1;
  }
  return marked;
}

int64_t bases_offset(int64_t n, int64_t k) { return n * row_runs(k) * kRunBytes; }

int64_t bytes_in_12(int64_t n, int64_t k, int64_t marked) {
  const int64_t bases = n * row_runs(k) * static_cast<int64_t>(sizeof(uint32_t));
  return round_up(bases_offset(n, k) + bases, kAlign) + marked * kPlainRunBytes;
}

bool pays_in_12(int64_t n, int64_t k, int64_t marked) {
  return bytes_in_12(n, k, marked) <= matrix_bytes(MatrixFormat::kBF16, n, k) * 13 / 16;
}

void put_in_12(const Matrix& matrix, int64_t first, int64_t last, int64_t marked_before, uint8_t* to) {
  const int64_t k = matrix.k, runs = row_runs(k);
  uint8_t* run = to + first * runs * kRunBytes;
  auto* base = reinterpret_cast<uint32_t*>(to + bases_offset(matrix.n, k)) + first * runs;
  uint8_t* plain_run = to + bytes_in_12(matrix.n, k, marked_before);
  for (int64_t n = first; n < last; ++n) {
    const uint16_t* row = static_cast<const uint16_t*>(matrix.codes) + n * k;
    for (int64_t c = 0; c < k; c += kRunColumns, run += kRunBytes, ++base) {
      const uint16_t* codes = row + c;
      const int64_t count = std::min(kRunColumns, k - c);
      const Exponents of_run = exponents(codes, count);
      uint16_t filled[kRunColumns];
      if (count < kRunColumns) {
        std::copy_n(codes, count, filled);
        const uint16_t filling = of_run.fit() ? static_cast<uint16_t>(of_run.least) : uint16_t{0};
        std::fill(filled + count, filled + kRunColumns, filling);
        codes = filled;
      }
      if (of_run.fit()) {
        *base = static_cast<uint32_t>(of_run.least) * 0x10001;
        put_run(codes, static_cast<uint16_t>(of_run.least), run);
        continue;
      }
      *base = kMarkedRun;
      const int64_t distance = plain_run - run;
      std::memset(run, 0, kRunBytes);
      std::memcpy(run, &distance, sizeof(distance));
      put_plain_run(codes, plain_run);
      plain_run += kPlainRunBytes;
    }
  }
}

}  // namespace nibble::cpu
