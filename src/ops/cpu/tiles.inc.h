// Products of weights in tiles (weight_tiles.h) with rows in fixed point (FixedGroup, or in 8 bits
// Int8Group).
//
// Order of the sum, the same for every number of rows and every instruction set: the integer sum over the
// block of columns that share a weight scale, exact; rounded to float once; times the scale (of 8 bits: times
// the product of the weights' scale and the row's). These are added
// over the blocks of 128 columns, and what that gives, times the row's scale there and the format's factor
// (two powers of two), to the output; at last comes the tensor scale. Each product and sum is rounded, so
// that machines without FMA give the same bits.
//
// Lane i of every vector is weight row i of a tile. A byte of codes holds two columns: the low nibbles of 64
// bytes are 4 columns of 16 rows, the high ones 4 others. A table makes of them numbers of 0 to 24, 12 too
// large, which `starts` takes back. One dot product of bytes adds 4 columns of one digit of x; each
// digit has its own sum, three short chains instead of a long one.
//
// Bytes: the weights once for each kFixedRows rows, the rows once for each tile. A task's weights and the
// rows of a register tile fit in L2 together.

// Codes as bfloat16 numbers.
constexpr uint16_t kTwiceE2m1[16] = {0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40C0, 0x4100, 0x4140,
                                     0, 0xBF80, 0xC000, 0xC040, 0xC080, 0xC0C0, 0xC100, 0xC140};
constexpr uint16_t kInt4[16] = {0,      0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
                                0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80};

struct Nvfp4Tile {
  static constexpr int64_t kColumns = 16, kScaleBytes = 1;
  static constexpr float kFactor = 0x1p7f;  // 2^8 for what load_scales_e4m3 gives, half for twice e2m1
  static Vec scales(const uint8_t* p) { return load_scales_e4m3(p); }
  static Ints values(Ints nibbles) { return e2m1_bytes(nibbles); }
  static const uint16_t* bf16() { return kTwiceE2m1; }
};
struct Mxfp4Tile {
  static constexpr int64_t kColumns = 32, kScaleBytes = 1;
  static constexpr float kFactor = 0x1p21f;  // 2^22 for the scales, half for twice e2m1
  // e8m0 is float's exponent, but for code 0: 2^-127 is subnormal. 2^-22 of it, which the smallest still has
  // exactly, so that integers of up to 2^31 times scales of up to 2^118 stay finite; a matrix with larger
  // ones is not brought into tiles.
  static Vec scales(const uint8_t* p) {
    const Vec scales = from_bits(bit_and(shift_left<23>(load_bytes(p)), splat_int(0x7F800000)));
    return mul(at_least(0x1p-127f, scales), splat(0x1p-22f));
  }
  static Ints values(Ints nibbles) { return e2m1_bytes(nibbles); }
  static const uint16_t* bf16() { return kTwiceE2m1; }
};
struct Q4Tile {
  static constexpr int64_t kColumns = 32, kScaleBytes = 2;
  static constexpr float kFactor = 1.0f;
  static Vec scales(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
  static Ints values(Ints nibbles) { return int4_bytes(nibbles); }
  static const uint16_t* bf16() { return kInt4; }
};

// The integer sums of the block that begins with `set` of x.
template <int kSets, class Group>
NIBBLE_INLINE Ints block_sums(const Ints (&w)[kSets][4], const Group& x, int64_t set) {
  Ints start = splat_int(x.starts[set]);
  if constexpr (kSets == 2) start = add(start, splat_int(x.starts[set + 1]));
  constexpr int kLast = Group::kDigits - 1;
  Ints sums[Group::kDigits];
#pragma GCC unroll 3
  for (int digit = 0; digit < kLast; ++digit) sums[digit] = splat_int(0);
  sums[kLast] = start;
#pragma GCC unroll 2
  for (int s = 0; s < kSets; ++s) {
#pragma GCC unroll 3
    for (int digit = 0; digit < Group::kDigits; ++digit)
      sums[digit] = dot(sums[digit], w[s], x.digits[set + s][digit]);
  }
  Ints total = sums[0];
#pragma GCC unroll 3
  for (int digit = 1; digit < Group::kDigits; ++digit) total = add(shift_left<8>(total), sums[digit]);
  return total;
}

// What the integer sums over the block at `column` of a group are multiplied with.
NIBBLE_INLINE Vec scales_of(Vec of_weights, const FixedGroup& /*x*/, int64_t /*column*/) {
  return of_weights;
}
NIBBLE_INLINE Vec scales_of(Vec of_weights, const Int8Group& x, int64_t column) {
  return mul(of_weights, splat(x.block_scales[column / Int8Group::kBlockColumns]));
}

// Adds the products of the 128 columns at `group`, or of as many blocks as there are, with M rows.
template <class Format, class Group, int M>
NIBBLE_INLINE void add_group(const uint8_t* group, int64_t blocks, const Group* const (&x)[M],
                             Vec (&sums)[M]) {
  constexpr int kSets = Format::kColumns / 16;
  Vec partial[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) partial[m] = zero();
  const uint8_t* codes = group + blocks * (kTileWeightRows * Format::kScaleBytes);
  for (const uint8_t* line = group; line < codes; line += 64) ask_ahead(line);
  for (int64_t b = 0; b < blocks; ++b) {
    Ints w[kSets][4];
#pragma GCC unroll 4
    for (int i = 0; i < kSets * 2; ++i) {
      const Ints pairs = load_codes(codes + i * 64);
      ask_ahead(codes + i * 64);
      w[i / 2][i % 2 * 2] = Format::values(low_nibbles(pairs));
      w[i / 2][i % 2 * 2 + 1] = Format::values(low_nibbles(shift_right<4>(pairs)));
    }
    codes += kSets * 128;
    const Vec scales = Format::scales(group + b * (kTileWeightRows * Format::kScaleBytes));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
      partial[m] = add(partial[m], mul(to_float(block_sums<kSets>(w, *x[m], b * kSets)),
                                       scales_of(scales, *x[m], b * Format::kColumns)));
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) sums[m] = add(sums[m], mul(partial[m], splat(x[m]->scale * Format::kFactor)));
}

// The 16 outputs of a tile for M rows.
template <class Format, class Group, int M>
NIBBLE_INLINE void tile_product(const uint8_t* tile, const Weights& w, const Group* const (&rows)[M],
                                Vec (&out)[M]) {
  constexpr int64_t kBlocks = kPackedColumns / Format::kColumns;
  constexpr int64_t kGroupBytes = kBlocks * kTileWeightRows * (Format::kColumns / 2 + Format::kScaleBytes);
  const Group* x[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    x[m] = rows[m];
    out[m] = zero();
  }
  for (int64_t columns = w.k; columns > 0; columns -= kPackedColumns) {
    // The number of blocks of a whole group is a constant to the compiler.
    if (columns >= kPackedColumns) {
      add_group<Format, Group, M>(tile, kBlocks, x, out);
    } else {
      add_group<Format, Group, M>(tile, columns / Format::kColumns, x, out);
    }
    tile += kGroupBytes;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) ++x[m];
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) out[m] = mul(out[m], splat(w.tensor_scale));
}

// The block's columns for `rows` <= M of its rows from r on.
template <class Format, class Group, int M>
void tile_rows(const Block& block, int64_t r, int64_t rows) {
  if constexpr (M > 1) {
    if (rows < M) return tile_rows<Format, Group, M - 1>(block, r, rows);
  }
  const Group* x[M];
  for (int m = 0; m < M; ++m)
    x[m] = reinterpret_cast<const Group*>(packed_row(block.x, block.first_row + r + m));
  const int64_t tile_bytes =
      block.w.k / Format::kColumns * kTileWeightRows * (Format::kColumns / 2 + Format::kScaleBytes);
  const uint8_t* tiles = static_cast<const uint8_t*>(block.w.codes);
  for (int64_t n = 0; n < block.columns; n += kTileWeightRows) {
    Vec sums[M];
    tile_product<Format, Group, M>(tiles + (block.first + n) / kTileWeightRows * tile_bytes, block.w, x,
                                   sums);
    float* out = block.out + r * block.out_stride + n;
    const int64_t columns = block.columns - n;
    for (int m = 0; m < M; ++m, out += block.out_stride) {
      columns >= kLanes ? store(out, sums[m]) : store_tail(out, columns, sums[m]);
    }
  }
}

template <class Format, class Group>
void register_tiles(const Block& block) {
  // Row tiles of nearly equal height, as in the buffered path.
  const int64_t row_tiles = (block.rows + kFixedRows - 1) / kFixedRows;
  for (int64_t tile = 0; tile < row_tiles; ++tile) {
    const int64_t r = block.rows * tile / row_tiles, next = block.rows * (tile + 1) / row_tiles;
    tile_rows<Format, Group, kFixedRows>(block, r, next - r);
  }
}

#if defined(NIBBLE_AMX)
template <class Format, class Group>
void amx_block(const Block& block);  // amx_tiles.inc.h

template <class Format, class Group>
void tile_block_of(const Block& block) {
  // So many rows are faster there (measured), and so many more than a multiple of its 16; of 8 bits, where
  // vectors have most of the work, NVFP4 is so from two such tiles on.
  constexpr bool kExact = Group::kDigits > 1, kWide = Format::kColumns > 16;
  constexpr int64_t kFewest = kExact ? (kWide ? 4 : 7) : (kWide ? 7 : kLanes);
  constexpr int64_t kFewestInAll = kFewest < kLanes ? kFewest : 2 * kLanes;
  const int64_t past = block.rows % kLanes;
  const int64_t r = block.rows < kFewestInAll ? 0 : past < kFewest ? block.rows - past : block.rows;
  const int64_t more = block.rows - r;
  if (r > 0)
    amx_block<Format, Group>(
        {block.w, block.x, block.first, block.columns, block.first_row, r, block.out, block.out_stride});
  if (more > 0)
    register_tiles<Format, Group>({block.w, block.x, block.first, block.columns, block.first_row + r, more,
                                   block.out + r * block.out_stride, block.out_stride});
}
#else
template <class Format, class Group>
void tile_block_of(const Block& block) {
  register_tiles<Format, Group>(block);
}
#endif

template <class Format>
void tile_block(const Block& block) {
  if (block.w.packing == Packing::kInt8) return tile_block_of<Format, Int8Group>(block);
  tile_block_of<Format, FixedGroup>(block);
}
