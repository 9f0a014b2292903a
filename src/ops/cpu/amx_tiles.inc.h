// Products of weights in tiles with many rows on AMX, bit for bit those of tiles.inc.h.
//
// A weight (twice e2m1, or int4) is a bfloat16 number, and so is each digit of a row times its power of two.
// TDPBF16PS adds the products of up to 32 columns to each other, and the result to a sum of before. Of the
// columns under one scale those of the two lower digits come first (at most 32 x 12 x 32896 < 2^24), then
// those of the highest (multiples of 2^16 below 2^31): all is exact but the last addition, which rounds once,
// to the nearest. That is the float of the exact integer sum. What is left for vectors is a product and a sum
// for each block and row.
//
// A unit of work is two blocks of two weight tiles and a row tile of up to 16 activation rows. Registers (to
// not call them tiles): 0 to 3 sums of 16 weight rows, 4 and 5 activations, 6 and 7 weights of both tiles. A
// sum takes 16 cycles for each digit and comes out after 52 more: it is stored a block later, and vectors are
// a unit behind. Bound by: 48 cycles of TDPBF16PS a block and 16 rows (exact); of 8 bits 16 cycles of a store
// and 26 of vectors, which share a port.
//
// Bytes: of 128 columns the weights once for each kBlockRows rows, into 64 KB (L2); a row tile's activations
// once for each kAmxTiles weight tiles, into 12 KB (L1).
#if defined(NIBBLE_AMX)

constexpr int kUnitBlocks = 2;
constexpr int64_t kAmxTiles = 16;

template <class Format, class Group>
struct AmxShape {
  static constexpr int kBlocks = kPackedColumns / Format::kColumns, kUnits = kBlocks / kUnitBlocks;
  static constexpr int kDigits = Group::kDigits, kPairs = Format::kColumns / 2;  // of columns
};

// Sums of a unit's blocks, of both tiles.
using AmxProducts = float[2][kUnitBlocks][kLanes][kLanes];

template <class Format, class Group>
struct AmxBuffers {
  using Shape = AmxShape<Format, Group>;
  alignas(64) uint16_t rows[Shape::kBlocks][Shape::kDigits][kLanes][Shape::kPairs * 2];
  alignas(64) uint16_t weights[kAmxTiles][Shape::kBlocks][Shape::kPairs][2 * kLanes];
  alignas(64) AmxProducts products[2], no_products;
  alignas(64) float partial[2][kLanes][kLanes];
  alignas(64) float sums[kAmxTiles][kBlockRows][kLanes];
  // Of two groups of columns, since vectors are behind.
  alignas(64) float scales[2][kAmxTiles][Shape::kBlocks][kLanes];
  float row_scales[2][kBlockRows];
  float block_scales[2][kBlockRows][kPackedColumns / Int8Group::kBlockColumns];
};

// Shapes of the registers for `rows` activation rows.
inline void configure_amx(int rows, int pairs) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 0, 0, 64, 64};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 6; ++i) config.rows[i] = static_cast<uint8_t>(rows);
  config.row_bytes[4] = config.row_bytes[5] = static_cast<uint16_t>(pairs * 4);
  config.rows[6] = config.rows[7] = static_cast<uint8_t>(pairs);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
template <int kRegister>
NIBBLE_INLINE void load_register(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
NIBBLE_INLINE void store_register(float (*p)[kLanes]) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(INT64_C(64)), "i"(kRegister) : "memory");
}
template <int kRegister>
NIBBLE_INLINE void zero_register() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}
template <int kSum, int kRows, int kWeights>
NIBBLE_INLINE void add_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}

// Decodes the group at `group`; blocks that it does not have are zeros.
template <class Format, class Group>
void decode_group(const uint8_t* group, int64_t blocks, float (*scales)[kLanes],
                  uint16_t (*weights)[AmxShape<Format, Group>::kPairs][2 * kLanes]) {
  using Shape = AmxShape<Format, Group>;
  constexpr int64_t kScaleBytes = kTileWeightRows * Format::kScaleBytes;
  const uint8_t* codes = group + blocks * kScaleBytes;
  // A word looks itself up by its lowest five bits, of which the fifth is none of the code's.
  const __m256i sixteen = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(Format::bf16()));
  const Ints table = _mm512_broadcast_i64x4(sixteen);
  for (int64_t b = 0; b < blocks; ++b) {
    store(scales[b], Format::scales(group + b * kScaleBytes));
#pragma GCC unroll 4
    for (int i = 0; i < Shape::kPairs; i += 4, codes += 64) {
      const Ints pairs = load_codes(codes);
      __builtin_prefetch(codes + kPackedColumns / 2 * kTileWeightRows + Shape::kBlocks * kScaleBytes, 0, 2);
      auto put = [&](int at, Ints words) {
        _mm512_store_si512(weights[b][i + at], _mm512_permutexvar_epi16(words, table));
      };
      put(0, pairs);
      put(1, shift_right<4>(pairs));
      put(2, shift_right<8>(pairs));
      put(3, shift_right<12>(pairs));
    }
  }
  if (blocks == Shape::kBlocks) return;
  __builtin_memset(weights[blocks], 0, static_cast<uint64_t>(Shape::kBlocks - blocks) * sizeof(*weights));
  __builtin_memset(scales[blocks], 0, static_cast<uint64_t>(Shape::kBlocks - blocks) * sizeof(*scales));
}

// The digits of row m of `rows`, the lowest first, as bfloat16 numbers, columns as in `weights`.
template <class Format, class Group, class Rows>
NIBBLE_INLINE void spread_row(const Group& x, int64_t m, Rows& rows) {
  constexpr int kDigits = Group::kDigits;
  // Upper halves, of each 8 lanes 0 2 4 6 1 3 5 7: columns 0 4 1 5 2 6 3 7.
  const Ints order = _mm512_set_epi16(63, 59, 55, 51, 61, 57, 53, 49, 47, 43, 39, 35, 45, 41, 37, 33,  //
                                      31, 27, 23, 19, 29, 25, 21, 17, 15, 11, 7, 3, 13, 9, 5, 1);
#pragma GCC unroll 4
  for (int set = 0; set < Group::kSets; set += 2) {
#pragma GCC unroll 3
    for (int i = 0; i < kDigits; ++i) {
      auto values = [&](const int8_t(&digits)[kDigits][16]) {
        const Ints bytes = load_bytes(reinterpret_cast<const uint8_t*>(digits[kDigits - 1 - i]));
        return bits(mul(to_float(bytes), splat(static_cast<float>(1 << (8 * i)))));
      };
      const Ints both = _mm512_permutex2var_epi16(values(x.digits[set]), order, values(x.digits[set + 1]));
      if constexpr (Format::kColumns == 32) {
        _mm512_store_si512(rows[set / 2][i][m], both);
      } else {
        _mm256_store_si256(reinterpret_cast<__m256i*>(rows[set][i][m]), _mm512_castsi512_si256(both));
        _mm256_store_si256(reinterpret_cast<__m256i*>(rows[set + 1][i][m]),
                           _mm512_extracti64x4_epi64(both, 1));
      }
    }
  }
}

// Units, one after the other.
template <class Format, class Group>
struct AmxUnits {
  using Shape = AmxShape<Format, Group>;
  using Weights = const uint16_t (*)[Shape::kBlocks][Shape::kPairs][2 * kLanes];
  using Rows = const uint16_t (*)[Shape::kDigits][kLanes][Shape::kPairs * 2];

  // What the vectors of a unit take, and where they add: of two tiles, from its first row on.
  struct Unit {
    AmxProducts* products;
    const float (*scales)[Shape::kBlocks][kLanes];
    float (*sums)[kBlockRows][kLanes];
    const float* row_scales;
    const float (*block_scales)[kPackedColumns / Int8Group::kBlockColumns];
  };

  // The sums of one tile of a unit, scaled, for `rows` rows.
  template <int kUnit, int kTile>
  static NIBBLE_INLINE void add_rows(const Unit& unit, float (*all_partial)[kLanes][kLanes], int64_t rows) {
    constexpr int kAtOnce = 4, kFirst = kUnit * kUnitBlocks;
    constexpr bool kIsLast = kUnit + 1 == Shape::kUnits;
    const auto& products = (*unit.products)[kTile];
    float(*partial)[kLanes] = all_partial[kTile];
    float(*out)[kLanes] = unit.sums[kTile];
    Vec of_weights[kUnitBlocks];
    for (int b = 0; b < kUnitBlocks; ++b) of_weights[b] = load(unit.scales[kTile][kFirst + b]);
    for (int64_t row = 0; row < rows; row += kAtOnce) {
#pragma GCC unroll 4
      for (int64_t m = row; m < row + kAtOnce; ++m) {
        Vec sum = kUnit == 0 ? zero() : load(partial[m]);
#pragma GCC unroll 2
        for (int b = 0; b < kUnitBlocks; ++b) {
          Vec scale = of_weights[b];
          if constexpr (Group::kDigits == 1) {
            const int64_t column = (kFirst + b) * Format::kColumns;
            scale = mul(scale, splat(unit.block_scales[m][column / Int8Group::kBlockColumns]));
          }
          sum = add(sum, mul(load(products[b][m]), scale));
        }
        if constexpr (kIsLast) sum = add(load(out[m]), mul(sum, splat(unit.row_scales[m])));
        store(kIsLast ? out[m] : partial[m], sum);
      }
    }
  }

  template <int kBlock>
  static NIBBLE_INLINE void store_block(AmxProducts& products) {
    store_register<kBlock % 2 * 2>(products[0][kBlock]);
    store_register<kBlock % 2 * 2 + 1>(products[1][kBlock]);
  }

  // The products of a block; then the sums of the block before are stored.
  template <int kBlock>
  static NIBBLE_INLINE void multiply(Rows rows, Weights weights, int block, const Unit& unit,
                                     const Unit& behind) {
    constexpr int kFirst = kBlock % 2 * 2, kSecond = kFirst + 1;
    constexpr int64_t kStride = Shape::kPairs * 4;
    load_register<4>(rows[block][0], kStride);
    load_register<6>(weights[0][block], 64);
    zero_register<kFirst>();
    add_product<kFirst, 4, 6>();
    load_register<7>(weights[1][block], 64);
    zero_register<kSecond>();
    add_product<kSecond, 4, 7>();
    if constexpr (Shape::kDigits > 1) {
      load_register<5>(rows[block][1], kStride);
      add_product<kFirst, 5, 6>();
      add_product<kSecond, 5, 7>();
    }
    if constexpr (Shape::kDigits > 2) {
      load_register<4>(rows[block][2], kStride);
      add_product<kFirst, 4, 6>();
      add_product<kSecond, 4, 7>();
    }
    if constexpr (kBlock > 0) {
      store_block<kBlock - 1>(*unit.products);
    } else {
      store_block<kUnitBlocks - 1>(*behind.products);
    }
  }

  // All units of 128 columns of two weight tiles and the rows of `rows`; `behind` is the last one before,
  // then that of these.
  template <int kUnit = 0>
  static NIBBLE_INLINE void multiply_group(AmxBuffers<Format, Group>& buffers, int64_t rows, Weights weights,
                                           Unit unit, Unit& behind) {
    constexpr int kBehind = (kUnit + Shape::kUnits - 1) % Shape::kUnits, kBlock = kUnit * kUnitBlocks;
    unit.products = &buffers.products[behind.products == &buffers.products[0] ? 1 : 0];
    multiply<0>(buffers.rows, weights, kBlock, unit, behind);
    add_rows<kBehind, 0>(behind, buffers.partial, rows);
    multiply<1>(buffers.rows, weights, kBlock + 1, unit, behind);
    add_rows<kBehind, 1>(behind, buffers.partial, rows);
    behind = unit;
    if constexpr (kUnit + 1 < Shape::kUnits) multiply_group<kUnit + 1>(buffers, rows, weights, unit, behind);
  }

  // A unit that adds nothing, for the first to be behind.
  static Unit nothing(AmxBuffers<Format, Group>& buffers) {
    zero_register<2>();
    zero_register<3>();
    __builtin_memset(buffers.no_products, 0, sizeof(buffers.no_products));
    __builtin_memset(buffers.partial, 0, sizeof(buffers.partial));
    const auto* zeros = buffers.no_products[0][0];
    return {&buffers.no_products, reinterpret_cast<const float(*)[Shape::kBlocks][kLanes]>(zeros),
            buffers.sums, zeros[0], reinterpret_cast<decltype(Unit::block_scales)>(zeros)};
  }
  static void finish(AmxBuffers<Format, Group>& buffers, int64_t rows, const Unit& behind) {
    constexpr int kUnit = Shape::kUnits - 1;
    store_block<kUnitBlocks - 1>(*behind.products);
    add_rows<kUnit, 0>(behind, buffers.partial, rows);
    add_rows<kUnit, 1>(behind, buffers.partial, rows);
  }
};

template <class Format, class Group>
void amx_block(const Block& block) {
  AmxBuffers<Format, Group> buffers;
  using Shape = AmxShape<Format, Group>;
  using Units = AmxUnits<Format, Group>;
  constexpr int64_t kBlockBytes = kTileWeightRows * (Format::kColumns / 2 + Format::kScaleBytes);
  // Row tiles of equal height; vectors take 4 rows at once. The last one begins where it ends with the block:
  // some rows are computed twice.
  const int64_t row_tiles = (block.rows + kLanes - 1) / kLanes;
  const int64_t height = (block.rows + row_tiles - 1) / row_tiles;
  const int64_t tile_rows = (height + 3) / 4 * 4, rows = row_tiles * tile_rows;
  const int64_t tile_bytes = block.w.k / Format::kColumns * kBlockBytes;
  auto row_of = [&](int64_t i) {
    return smaller(i / tile_rows * height, block.rows - height) + smaller(i % tile_rows, height - 1);
  };
  configure_amx(static_cast<int>(tile_rows), Shape::kPairs);
  for (int64_t n = 0; n < block.columns; n += kAmxTiles * kLanes) {
    const int64_t tiles = (smaller(kAmxTiles * kLanes, block.columns - n) + kLanes - 1) / kLanes;
    for (int64_t tile = 0; tile < tiles + tiles % 2; ++tile)
      __builtin_memset(buffers.sums[tile], 0, static_cast<uint64_t>(rows) * sizeof(*buffers.sums[tile]));
    typename Units::Unit behind = Units::nothing(buffers);
    for (int64_t at = 0; at < block.w.k; at += kPackedColumns) {
      const int64_t side = at / kPackedColumns % 2;
      const uint8_t* group = static_cast<const uint8_t*>(block.w.codes) +
                             (block.first + n) / kTileWeightRows * tile_bytes +
                             at / Format::kColumns * kBlockBytes;
      const int64_t blocks = smaller(Shape::kBlocks, (block.w.k - at) / Format::kColumns);
      for (int64_t row = 0; row < rows; row += tile_rows) {
        for (int64_t i = 0; i < tile_rows; ++i) {
          const float* packed = packed_row(block.x, block.first_row + row_of(row + i));
          const Group& x = reinterpret_cast<const Group*>(packed)[at / kPackedColumns];
          for (uint64_t line = 0; line < sizeof(Group); line += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(&x + 1) + line, 0, 2);
          spread_row<Format>(x, i, buffers.rows);
          buffers.row_scales[side][row + i] = x.scale * Format::kFactor;
          if constexpr (Group::kDigits == 1)
            __builtin_memcpy(buffers.block_scales[side][row + i], x.block_scales, sizeof(x.block_scales));
        }
        for (int64_t tile = 0; tile < tiles; tile += 2) {
          auto* weights = &buffers.weights[row_tiles > 1 ? tile : 0];
          for (int64_t i = 0; row == 0 && i < 2; ++i)
            decode_group<Format, Group>(group + smaller(tile + i, tiles - 1) * tile_bytes, blocks,
                                        buffers.scales[side][tile + i], weights[i]);
          Units::multiply_group(buffers, tile_rows, weights,
                                {nullptr, &buffers.scales[side][tile],
                                 reinterpret_cast<float(*)[kBlockRows][kLanes]>(buffers.sums[tile][row]),
                                 &buffers.row_scales[side][row], &buffers.block_scales[side][row]},
                                behind);
        }
      }
    }
    Units::finish(buffers, tile_rows, behind);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t columns = smaller(kLanes, block.columns - n - tile * kLanes);
      for (int64_t i = 0; i < rows; ++i) {
        const Vec out = mul(load(buffers.sums[tile][i]), splat(block.w.tensor_scale));
        float* p = block.out + row_of(i) * block.out_stride + n + tile * kLanes;
        columns == kLanes ? store(p, out) : store_tail(p, columns, out);
      }
    }
  }
  __asm__ volatile("tilerelease");
}

#endif
