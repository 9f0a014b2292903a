// Rows rounded to bfloat16 for products with BF16 weights (BackendOptions::cpu_activations), on machines that
// multiply pairs of such numbers: a pair takes the place that a column has elsewhere, so that linear.inc.h
// and element_tiles.inc.h are all else that it needs. Lane i takes the i-th of each 16 pairs in turn; numbers
// below 2^-126 count as zero, as the instruction has it.
#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

struct PairDot {
  // Rows in half the bytes: six of 4 KB and three of weights meet less in the first-level cache than eight.
  static constexpr int kTileRows = 6, kMostRows = 64;
  static NIBBLE_INLINE Vec add(Vec w, Vec x, Vec sum) { return dot_pairs(w, x, sum); }
};

void pack_pairs(const float* x, int64_t k, float* packed) {
  const int64_t padded = (k + kPackedColumns - 1) / kPackedColumns * kPackedColumns;
  for (int64_t i = 0; i < padded; i += kLanes) {
    store_bf16(packed + i / 2, i < k ? load_up_to(x + i, k - i) : zero());
  }
}
#else
constexpr bool kHasPairs = false;

using PairDot = Fma;  // of rows that nobody can pack

void pack_pairs(const float* /*x*/, int64_t /*k*/, float* /*packed*/) { __builtin_trap(); }
#endif
