// Products of weights in tiles with many rows on AMX, bit for bit those of tiles.inc.h.
//
// A weight (twice e2m1, or int4) is a bfloat16 number, and so is each digit of a row times its power of two.
// TDPBF16PS adds the products of up to 32 columns to each other, and the result to a sum of before. Of the
// columns under one scale those of the two lower digits come first (below 32 x 12 x 2^15 < 2^24), then those
// of the highest (multiples of 2^16 below 2^31): all is exact but the last addition, which rounds once, to
// the nearest. That is the float of the exact integer sum. What is left for vectors is a product and a sum
// for each block and row.
//
// Registers (to not call them tiles): 0 to 3 sums, 16 weight rows of up to 16 activation rows; 4 and 5
// activations of 32 and of 16 columns; 6 and 7 weights of as many. An addition takes 52 cycles to come out
// and 16 of the unit, so that vectors follow kDelay blocks behind.
//
// Bytes: of 128 columns all activations of the block (96 KB, copied from where index says) pass by each
// weight tile. Weights are decoded once for each 128 rows.
#if defined(__AMX_BF16__)

constexpr int64_t kAmxTiles = 8;  // weight tiles whose sums wait in memory
constexpr int kDelay = 2;

template <class Group>
struct AmxBuffers {
  alignas(64) uint16_t rows[kBlockRows][Group::kSets / 2][Group::kRuns][32];
  // Of two sets: pairs of columns of 16 weight rows, each set's eight twice.
  alignas(64) uint16_t weights[Group::kSets / 2][4][8][32];
  alignas(64) float scales[Group::kSets][kLanes];
  alignas(64) float products[4][kLanes][kLanes];
  alignas(64) float sums[kAmxTiles][kBlockRows][kLanes];
  float row_scales[kBlockRows];
  float block_scales[kBlockRows][kPackedColumns / Int8Group::kBlockColumns];
};

// Shapes of the registers for `rows` activation rows.
inline void configure_amx(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 32, 64, 64};
    uint8_t rows[16] = {0, 0, 0, 0, 0, 0, 16, 8};
  } config;
  for (int i = 0; i < 6; ++i) config.rows[i] = static_cast<uint8_t>(rows);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
template <int kRegister>
NIBBLE_INLINE void load_register(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kRegister) : "memory");
}
template <int kSum, int kRows, int kWeights>
NIBBLE_INLINE void add_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}

// Decodes the group at `group`; blocks that it does not have are zeros.
template <class Format, class Group>
NIBBLE_INLINE void decode_group(const uint8_t* group, int64_t blocks, AmxBuffers<Group>& buffers) {
  const uint8_t* codes = group + blocks * (kTileWeightRows * Format::kScaleBytes);
  // A word looks itself up by its lowest five bits, of which the fifth is none of the code's.
  const __m256i codes_table = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(Format::bf16()));
  const Ints table = _mm512_broadcast_i64x4(codes_table);
  auto look_up = [&](Ints words) { return _mm512_permutexvar_epi16(words, table); };
  for (int64_t b = 0; b < kPackedColumns / Format::kColumns; ++b) {
    store(buffers.scales[b],
          b < blocks ? Format::scales(group + b * (kTileWeightRows * Format::kScaleBytes)) : zero());
  }
  for (int64_t set = 0; set < Group::kSets; ++set, codes += 128) {
    uint16_t(*out)[8][32] = &buffers.weights[set / 2][set % 2 * 2];
    for (int half = 0; half < 2; ++half) {
      const bool there = set < blocks * (Format::kColumns / 16);
      const Ints pairs = there ? load_codes(codes + half * 64) : splat_int(0);
      const Ints two[] = {look_up(pairs), look_up(shift_right<4>(pairs)), look_up(shift_right<8>(pairs)),
                          look_up(shift_right<12>(pairs))};
      for (int i = 0; i < 4; ++i) {
        _mm512_store_si512(out[0][half * 4 + i], two[i]);
        _mm512_store_si512(out[1][half * 4 + i], two[i]);
      }
    }
  }
}

// One weight tile, 128 columns, kRows activation rows at a time.
template <class Format, class Group, int kRows>
struct AmxGroup {
  static constexpr int kBlocks = kPackedColumns / Format::kColumns, kSets = Format::kColumns / 16;
  AmxBuffers<Group>& buffers;
  float (*sums)[kLanes];
  Vec partial[kRows];

  template <int kBlock>
  NIBBLE_INLINE void multiply(int64_t row) {
    constexpr int kSum = kBlock % 4, kSet = kBlock * kSets % 2, kTop = Group::kRuns - 1;
    constexpr int64_t kStride = sizeof(Group::parts);
    const auto& x = buffers.rows[row][kBlock * kSets / 2];
    const auto& w = buffers.weights[kBlock * kSets / 2];
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kSum));
    for (int i = 0; i < (kTop > 0 ? kSets : 0); ++i) {
      load_register<4>(x[kSet + i], kStride);
      load_register<6>(w[2 * (kSet + i)], 64);
      add_product<kSum, 4, 6>();
    }
    if constexpr (kSets == 2) {
      load_register<4>(x[kTop], kStride);
      load_register<6>(w[1], 64);
      add_product<kSum, 4, 6>();
    } else {
      load_register<5>(&x[kTop][kSet * 16], kStride);
      load_register<7>(w[2 * kSet], 64);
      add_product<kSum, 5, 7>();
    }
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(buffers.products[kSum]), "r"(INT64_C(64)),
                     "i"(kSum)
                     : "memory");
  }

  template <int kBlock>
  NIBBLE_INLINE void add_block(int64_t row) {
    const Vec scales = load(buffers.scales[kBlock]);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      Vec factor = scales;
      if constexpr (Group::kDigits == 1) {
        factor =
            mul(scales,
                splat(buffers.block_scales[row + m][kBlock * Format::kColumns / Int8Group::kBlockColumns]));
      }
      partial[m] = add(partial[m], mul(load(buffers.products[kBlock % 4][m]), factor));
    }
  }

  NIBBLE_INLINE void finish(int64_t row) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      float* sum = sums[row + m];
      store(sum, add(load(sum), mul(partial[m], splat(buffers.row_scales[row + m]))));
      partial[m] = zero();
    }
  }

  template <int kBlock>
  NIBBLE_INLINE void step(int64_t row, int64_t rows) {
    constexpr int kBehind = (kBlock + kBlocks - kDelay) % kBlocks;
    if (row < rows) multiply<kBlock>(row);
    if (kBlock >= kDelay ? row < rows : row > 0) add_block<kBehind>(kBlock >= kDelay ? row : row - kRows);
    if (kBlock == kDelay - 1 && row > 0) finish(row - kRows);
    if constexpr (kBlock + 1 < kBlocks) step<kBlock + 1>(row, rows);
  }
};

template <class Format, class Group, int kRows>
void amx_rows(const Block& block, AmxBuffers<Group>& buffers, int64_t row_tiles) {
  constexpr int64_t kBlocks = kPackedColumns / Format::kColumns;
  constexpr int64_t kBlockBytes = kTileWeightRows * (Format::kColumns / 2 + Format::kScaleBytes);
  const int64_t height = (block.rows + row_tiles - 1) / row_tiles, rows = row_tiles * kRows;
  const int64_t tile_bytes = block.w.k / Format::kColumns * kBlockBytes;
  // The last tile begins where it ends with the block: some rows are computed twice.
  auto row_of = [&](int64_t i) {
    return smaller(i / kRows * height, block.rows - height) + smaller(i % kRows, height - 1);
  };
  configure_amx(kRows);
  for (int64_t n = 0; n < block.columns; n += kAmxTiles * kLanes) {
    const int64_t tiles = (smaller(kAmxTiles * kLanes, block.columns - n) + kLanes - 1) / kLanes;
    __builtin_memset(buffers.sums, 0, sizeof(buffers.sums));
    for (int64_t at = 0; at < block.w.k; at += kPackedColumns) {
      for (int64_t i = 0; i < rows; ++i) {
        const float* row = packed_row(block.x, block.first_row + row_of(i));
        const Group& x = reinterpret_cast<const Group*>(row)[at / kPackedColumns];
        __builtin_memcpy(buffers.rows[i], x.parts, sizeof(x.parts));
        buffers.row_scales[i] = x.scale * Format::kFactor;
        if constexpr (Group::kDigits == 1)
          __builtin_memcpy(buffers.block_scales[i], x.block_scales, sizeof(x.block_scales));
      }
      const uint8_t* group = static_cast<const uint8_t*>(block.w.codes) +
                             (block.first + n) / kTileWeightRows * tile_bytes +
                             at / Format::kColumns * kBlockBytes;
      const int64_t blocks = smaller(kBlocks, (block.w.k - at) / Format::kColumns);
      for (int64_t tile = 0; tile < tiles; ++tile, group += tile_bytes) {
        decode_group<Format>(group, blocks, buffers);
        AmxGroup<Format, Group, kRows> work{buffers, buffers.sums[tile], {}};
        for (int64_t row = 0; row <= rows; row += kRows) work.template step<0>(row, rows);
      }
    }
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

template <class Format, class Group>
void amx_block(const Block& block) {
  AmxBuffers<Group> buffers;
  const int64_t row_tiles = (block.rows + kLanes - 1) / kLanes;
  if (block.rows <= 8) return amx_rows<Format, Group, 8>(block, buffers, row_tiles);
  amx_rows<Format, Group, 16>(block, buffers, row_tiles);
}
#endif
