// Weight rows as the products in linear.inc.h read them: one struct for each way in which formats are laid
// out, over the primitives of one instruction set.
//
// A weight row as a source of vectors: chunk(c) loads what belongs to kVecs vectors, next() decodes them one
// after the other. Chunk c is the packed columns [c * kVecs * 16, (c + 1) * kVecs * 16). Where kScaled, a
// chunk has a vector of scales too.

// A row as decode() writes it: kVecs_ vectors of values and, where kScaled_, one of their scales, and so on.
template <int kVecs_, bool kScaled_, class Product_ = Fma>
struct BufferedRow {
  using Product = Product_;
  static constexpr int kVecs = kVecs_;
  static constexpr bool kScaled = kScaled_;
  struct Chunk {
    const float* values;
    Vec scales;  // where kScaled
  };
  const float* row;
  BufferedRow() = default;
  explicit BufferedRow(const float* row_) : row(row_) {}
  Chunk chunk(int64_t c) const {
    const float* at = row + c * (kVecs + (kScaled ? 1 : 0)) * kLanes;
    return {at, kScaled ? load(at + kVecs * kLanes) : zero()};
  }
  Chunk tail(int64_t c, int64_t /*columns*/) const { return chunk(c); }  // padded
  void prefetch(int64_t /*c*/) const {}
  static Vec next(Chunk& chunk) {
    Vec value = load(chunk.values);
    chunk.values += kLanes;
    return value;
  }
};

// e4m3 to float: the 7 bits in place under float's exponent are 2^-120 of the value, subnormals included.
NIBBLE_INLINE Vec e4m3(Ints code) {
  return mul(from_bits(bit_and(shift_left<20>(code), splat_int(static_cast<int32_t>(0x87F00000u)))),
             splat(0x1p120f));
}

// The formats with a code for each element, and how 16 of them become floats.
struct F32 {
  using Code = float;
  static Vec values(const float* p) { return load(p); }
};
struct F16 {
  using Code = uint16_t;
  static Vec values(const uint16_t* p) { return load_f16(p); }
};
struct BF16 {
  using Code = uint16_t;
  static Vec values(const uint16_t* p) { return load_bf16(p); }
};
struct E4M3 {
  using Code = uint8_t;
  static Vec values(const uint8_t* p) { return e4m3(load_bytes(p)); }
};

template <class Format, class Product_>
struct ElementRow {
  using Code = typename Format::Code;
  using Product = Product_;
  static constexpr int kTileRows = Product::kTileRows;
  static constexpr int kVecs = 1;
  static constexpr bool kScaled = false, kFuses = false;
  using Buffered = BufferedRow<1, false, Product>;
  using Chunk = Vec;
  const Code* codes;
  ElementRow() = default;
  ElementRow(const Weights& w, int64_t n) : codes(static_cast<const Code*>(w.codes) + n * w.k) {}
  Chunk chunk(int64_t c) const { return Format::values(codes + c * kLanes); }
  Chunk tail(int64_t c, int64_t columns) const {
    Code padded[kLanes] = {};
    __builtin_memcpy(padded, codes + c * kLanes, static_cast<uint64_t>(columns) * sizeof(Code));
    return Format::values(padded);
  }
  // Into the second-level cache: asking for the first one stalls on its few open misses (15 against 25 GB/s).
  // Past the matrix it is a hint without effect.
  void prefetch(int64_t column) const { __builtin_prefetch(codes + column, 0, 2); }
  static Vec next(Chunk& chunk) { return chunk; }
};

// e4m3 codes with one float scale for 128 rows x 128 columns.
struct Fp8BlockRow {
  using Product = Fma;
  static constexpr int kVecs = 8;
  static constexpr bool kScaled = true, kFuses = true;
  using Buffered = BufferedRow<8, true>;
  struct Chunk {
    const uint8_t* codes;
    Vec scales;
  };
  const uint8_t* codes;
  const float* scales;
  int64_t ahead;
  mutable uint8_t last[128];  // the padded codes that tail() points to
  Fp8BlockRow() = default;
  Fp8BlockRow(const Weights& w, int64_t n)
      : codes(static_cast<const uint8_t*>(w.codes) + n * w.k),
        scales(static_cast<const float*>(w.scales) + n / 128 * ((w.k + 127) / 128)),
        ahead(kTileColumns * w.k) {}
  Chunk chunk(int64_t c) const { return {codes + c * 128, splat(scales[c])}; }
  Chunk tail(int64_t c, int64_t columns) const {
    for (uint8_t& code : last) code = 0;
    __builtin_memcpy(last, codes + c * 128, static_cast<uint64_t>(columns));
    return {last, splat(scales[c])};
  }
  void prefetch(int64_t c) const {  // as NibbleRow's
    __builtin_prefetch(codes + ahead + c * 128);
    __builtin_prefetch(codes + ahead + c * 128 + 64);
  }
  static Vec next(Chunk& chunk) {
    Vec value = E4M3::values(chunk.codes);
    chunk.codes += kLanes;
    return value;
  }
};

// Any format, by its own decoder: buffered only, in pieces of kBlockDepth columns, which every group and
// every block of a scale divides.
struct DecodedRow {
  static constexpr int kVecs = 1;
  static constexpr bool kScaled = false, kFuses = false;
  using Buffered = BufferedRow<1, false>;
  const Weights* w;
  const uint8_t* codes;
  const uint8_t* scales;  // meant where scale_bytes > 0
  DecodedRow(const Weights& w_, int64_t n)
      : w(&w_),
        codes(static_cast<const uint8_t*>(w_.codes) + n * (w_.k / w_.group * w_.group_bytes)),
        scales(static_cast<const uint8_t*>(w_.scales) + n * (w_.k / w_.scale_columns * w_.scale_bytes)) {}
  void decode(int64_t begin, int64_t end, float* out) const {
    w->decode(codes + begin / w->group * w->group_bytes, scales + begin / w->scale_columns * w->scale_bytes,
              end - begin, out);
    for (int64_t i = end - begin; i % kLanes != 0; ++i) out[i] = 0.0f;
  }
};
