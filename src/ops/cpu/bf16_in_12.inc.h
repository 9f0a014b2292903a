// Rows of BF16 weights in 12 bits (bf16_in_12.h). Codes come back as they were, and each vector of 16 columns
// goes into the sums where one of plain BF16 does: the bits are those of linear.inc.h and
// element_tiles.inc.h over plain BF16, for every number of rows.
//
// Only with AVX-512: with AVX2 the 23 instructions that 128 columns take beside their products cost more than
// the bytes bring, but for a single row.
// Bytes: 196 for 128 weights, and 256 more for a marked run.
#if defined(__AVX512F__)
constexpr bool kHasIn12 = true;

// Vectors of 32 columns, as a product takes them, out of codes as In12Row has them.
template <class Product>
struct Unit {
  static constexpr int kVecs = 2;
  static NIBBLE_INLINE Vec vec(Ints codes, int half) {
    return from_bits(half == 0 ? shift_left<16>(codes)
                               : bit_and(codes, splat_int(static_cast<int32_t>(0xFFFF0000u))));
  }
};
#if defined(__AVX512BF16__)
template <>
struct Unit<PairDot> {
  static constexpr int kVecs = 1;
  static NIBBLE_INLINE Vec vec(Ints codes, int /*half*/) { return from_bits(side_by_side(codes)); }
};
#endif

template <class Product_>
struct In12Row {
  using Product = Product_;
  using Buffered = BufferedRow<1, false, Product>;
  static constexpr int kVecs = 1;
  static constexpr bool kScaled = false, kFuses = false;
  // One row less than plain elements have: the codes of 32 columns wait in a register for their second half.
  static constexpr int kTileRows = Product::kTileRows < 7 ? Product::kTileRows : 7;
  static constexpr int kUnits = 4;  // of a run
  // Columns of each, or pairs of columns.
  static constexpr int64_t kUnit = Unit<Product>::kVecs * kLanes, kRun = kUnits * kUnit;

  const uint8_t* runs;
  const uint32_t* bases;
  int64_t row_runs;
  In12Row() = default;
  In12Row(const Weights& w, int64_t n) : row_runs((w.k + kRun - 1) / kRun) {
    runs = static_cast<const uint8_t*>(w.codes) + n * row_runs * kRunBytes;
    bases = static_cast<const uint32_t*>(w.scales) + n * row_runs;
  }
  const uint8_t* at(int64_t run) const { return runs + run * kRunBytes; }

  struct Words {
    Ints a, b, c;
  };
  static NIBBLE_INLINE Words words(const uint8_t* run) {
    return {load_codes(run), load_codes(run + 64), load_codes(run + 128)};
  }
  static NIBBLE_INLINE Ints both_halves(uint16_t x) { return splat_int(static_cast<int32_t>(x * 0x10001u)); }
  // Lane i of the codes of unit u: column 32 u + i of the run in the low half, column 32 u + 16 + i in the
  // high one.
  static NIBBLE_INLINE Ints unmarked_codes(const Words& words, uint32_t base, int unit) {
    const Ints own = both_halves(0x87FF), exponent = splat_int(static_cast<int32_t>(base));
    if (unit == 0) return add(bit_and(words.a, own), exponent);
    if (unit == 1) return add(bit_and(words.b, own), exponent);
    if (unit == 2) return add(bit_and(words.c, own), exponent);
    Ints rest = bit_and(shift_right<12>(words.c), both_halves(0x0007));
    rest = and_or(shift_right<8>(words.b), both_halves(0x0078), rest);
    rest = and_or(shift_right<4>(words.a), both_halves(0x0780), rest);
    rest = and_or(shift_left<4>(words.c), both_halves(0x8000), rest);
    return add(rest, exponent);
  }
  NIBBLE_INLINE Ints codes(int64_t run, int unit) const {
    if (bases[run] != kMarkedRun) return unmarked_codes(words(at(run)), bases[run], unit);
    int64_t distance = 0;
    __builtin_memcpy(&distance, at(run), sizeof(distance));
    return load_codes(at(run) + distance + unit * 64);
  }

  // The same run `rows` further on; see ElementRow.
  NIBBLE_INLINE void prefetch(int64_t run, int64_t rows) const {
    const uint8_t* ahead = at(rows * row_runs + run);
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + 64, 0, 2);
    __builtin_prefetch(ahead + 128, 0, 2);
  }
};

// Whole runs: kBlockDepth is so many of them, and so a row in the buffer has room for them.
template <class Product>
void decode(const In12Row<Product>& row, int64_t begin, int64_t end, float* out) {
  using Row = In12Row<Product>;
  static_assert(kBlockDepth % Row::kRun == 0);
  for (int64_t run = begin / Row::kRun; run * Row::kRun < end; ++run) {
#pragma GCC unroll 4
    for (int u = 0; u < Row::kUnits; ++u) {
      const Ints codes = row.codes(run, u);
#pragma GCC unroll 2
      for (int half = 0; half < Unit<Product>::kVecs; ++half, out += kLanes)
        store(out, Unit<Product>::vec(codes, half));
    }
  }
}

// One vector of N weight rows, at `column` of M activation rows.
template <class Product, int M, int N>
NIBBLE_INLINE void add_half(const Ints (&codes)[N], int half, const float* const (&x)[M], int64_t column,
                            Vec (&sums)[N][M]) {
  Vec w[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) w[n] = Unit<Product>::vec(codes[n], half);
  add_products<Product, M, N>(w, x, column, sums);
}

// The whole runs from `run` on that are not marked, before `last`. Returns the first that it leaves.
template <class Product, int M, int N>
NIBBLE_INLINE int64_t add_runs(const In12Row<Product> (&rows)[N], const float* const (&x)[M], int64_t run,
                               int64_t last, Vec (&sums)[N][M]) {
  using Row = In12Row<Product>;
  // Few activation rows leave room for a run's words in registers. With more of them words are loaded again
  // for the last unit, and the compiler must not know that they are the same: it would let sums wait in
  // memory instead.
  constexpr bool kKeepsWords = M <= 2;
  Vec own_sums[N][M];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) own_sums[n][m] = sums[n][m];
  }
  for (; run < last; ++run) {
    bool is_marked = false;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) is_marked |= rows[n].bases[run] == kMarkedRun;
    if (__builtin_expect(is_marked, 0)) break;
    const uint8_t* at[N];
    typename Row::Words words[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      rows[n].prefetch(run, N);
      at[n] = rows[n].at(run);
      if constexpr (kKeepsWords) {
        const auto [a, b, c] = Row::words(at[n]);
        words[n] = {in_register(a), in_register(b), in_register(c)};
      }
    }
#pragma GCC unroll 4
    for (int u = 0; u < Row::kUnits; ++u) {
      Ints codes[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        if constexpr (!kKeepsWords) {
          __asm__("" : "+r"(at[n]));
          words[n] = Row::words(at[n]);
        }
        codes[n] = Row::unmarked_codes(words[n], rows[n].bases[run], u);
      }
#pragma GCC unroll 2
      for (int half = 0; half < Unit<Product>::kVecs; ++half)
        add_half<Product, M, N>(codes, half, x, run * Row::kRun + u * Row::kUnit + half * kLanes, own_sums);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[n][m] = own_sums[n][m];
  }
  return run;
}

// The columns [0, k): as many vectors of them as plain BF16 has. One of filling more would add zeros, and
// those turn a sum of -0 to +0.
template <class Product, int M, int N>
NIBBLE_INLINE void add_row(const In12Row<Product> (&rows)[N], const float* const (&x)[M], int64_t k,
                           Vec (&sums)[N][M]) {
  using Row = In12Row<Product>;
  for (int64_t run = 0; run * Row::kRun < k; ++run) {
    run = add_runs<Product, M, N>(rows, x, run, k / Row::kRun, sums);
    for (int v = 0; v < Row::kUnits * Unit<Product>::kVecs; ++v) {
      const int64_t column = run * Row::kRun + v * kLanes;
      if (column >= k) break;
      Ints codes[N];
      for (int n = 0; n < N; ++n) codes[n] = rows[n].codes(run, v / Unit<Product>::kVecs);
      add_half<Product, M, N>(codes, v % Unit<Product>::kVecs, x, column, sums);
    }
  }
}

template <class Product>
void product_in_12(const Block& block) {
  product_of_rows<In12Row<Product>>(block);
}
#else
constexpr bool kHasIn12 = false;

template <class Product>
void product_in_12(const Block& /*block*/) {
  __builtin_trap();  // nothing is placed so
}
#endif
