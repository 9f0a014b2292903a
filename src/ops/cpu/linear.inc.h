// Products with row-major weights: out[r][n] = tensor_scale * sum over k of x[r][k] * w[n][k].
//
// Shapes: x packed rows (kernels.h), w [N, K] in any format but those of tiles.inc.h, K a multiple of its
// group. Order of the sum, the same for every number of rows, tile and path: lane i of one accumulator takes
// the i-th of each 16 columns in turn, by FMA with the weight decoded exactly. FP8 in blocks: of each 128
// columns lane i has 8; their products with the codes' values are summed first, and the accumulator takes
// that sum by FMA with the block scale. Then the lanes are added by the tree of sum(); then one product with
// the tensor scale. Bytes: the weights once for each 128 rows, the activations once for each 16 weight rows.
//
// Three paths with the same bits:
//   elements  up to Product::kMostRows rows of a format without block scales: element_tiles.inc.h, of BF16 in
//             12 bits with bf16_in_12.inc.h
//   fused     up to kFusedRows rows: decode in registers, each weight serves all rows at once
//   buffered  more rows: 16 weight rows x 1024 columns are decoded into 72 KB of floats (L2), and register
//             tiles of kTileColumns x kTileRows run over them; a row tile's activations (24 KB) stay in L1
//             for the 16 weight rows. Accumulators wait in memory between blocks of columns. kDecoded goes
//             this way for any number of rows.

constexpr int64_t kBlockColumns = 16;  // weight rows of a block here; accumulators 128 x 16 x 64 B = 128 KB
constexpr int64_t kBlockDepth = 1024;  // packed columns of a block
constexpr int64_t kBufferedRow = kBlockDepth / 8 * 9;  // floats of a decoded row, block scales included

// Adds the products of one vector of N weight rows and of M activation rows. Where sums leave few registers
// free, GCC would load the activations again for each weight row, and loads would be what is short.
template <class Product, int M, int N>
NIBBLE_INLINE void add_products(const Vec (&w)[N], const float* const (&x)[M], int64_t column,
                                Vec (&sums)[N][M]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    Vec values = load(x[m] + column);
    if constexpr (M >= 4) values = in_register(values);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[n][m] = Product::add(w[n], values, sums[n][m]);
  }
}

// Adds one chunk of M activation rows x N weight rows to the accumulators.
template <class Row, int M, int N>
NIBBLE_INLINE void add_chunk(typename Row::Chunk (&chunk)[N], const float* const (&x)[M], int64_t column,
                             Vec (&sums)[N][M]) {
  Vec partial[N][M];
#pragma GCC unroll 8
  for (int j = 0; j < Row::kVecs; ++j) {
    Vec w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) w[n] = Row::next(chunk[n]);
    if constexpr (Row::kScaled) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Vec values = load(x[m] + column + j * kLanes);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
          partial[n][m] = j == 0 ? mul(w[n], values) : fma(w[n], values, partial[n][m]);
      }
    } else {
      add_products<typename Row::Product, M, N>(w, x, column + j * kLanes, sums);
    }
  }
  if constexpr (Row::kScaled) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[n][m] = fma(partial[n][m], chunk[n].scales, sums[n][m]);
    }
  }
}

// The columns [0, k) of M activation rows x N weight rows.
template <class Row, int M, int N>
NIBBLE_INLINE void add_columns(const Row (&rows)[N], const float* const (&x)[M], int64_t k,
                               Vec (&sums)[N][M]) {
  constexpr int64_t kChunk = Row::kVecs * kLanes;
  typename Row::Chunk chunk[N];
  int64_t c = 0;
  for (; (c + 1) * kChunk <= k; ++c) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      chunk[n] = rows[n].chunk(c);
      rows[n].prefetch(c);
    }
    add_chunk<Row, M, N>(chunk, x, c * kChunk, sums);
  }
  if (c * kChunk < k) {
    for (int n = 0; n < N; ++n) chunk[n] = rows[n].tail(c, k - c * kChunk);
    add_chunk<Row, M, N>(chunk, x, c * kChunk, sums);
  }
}

// M rows, all columns of the block, decoded in registers. A last tile with fewer weight rows than
// kTileColumns computes its last one again and drops it.
template <class Row, int M>
void fused(const Block& block) {
  const float* x[M];
  for (int m = 0; m < M; ++m) x[m] = packed_row(block.x, block.first_row + m);
  for (int64_t n0 = 0; n0 < block.columns; n0 += kTileColumns) {
    Row rows[kTileColumns];
    for (int n = 0; n < kTileColumns; ++n) {
      rows[n] = Row(block.w, block.first + smaller(n0 + n, block.columns - 1));
    }
    Vec sums[kTileColumns][M];
    for (auto& column : sums) {
      for (Vec& s : column) s = zero();
    }
    add_columns<Row, M, kTileColumns>(rows, x, block.w.k, sums);
    for (int64_t n = 0; n < kTileColumns && n0 + n < block.columns; ++n) {
      for (int m = 0; m < M; ++m) {
        block.out[m * block.out_stride + n0 + n] = sum(sums[n][m]) * block.w.tensor_scale;
      }
    }
  }
}

// The packed columns [begin, end) of one weight row, as Row::Buffered reads them; begin is a multiple of a
// chunk, and where end is not, the rest of the chunk is written as zeros.
inline void decode(const DecodedRow& row, int64_t begin, int64_t end, float* out) {
  row.decode(begin, end, out);
}
template <class Row>
void decode(const Row& row, int64_t begin, int64_t end, float* out) {
  constexpr int64_t kChunk = Row::kVecs * kLanes;
  for (int64_t at = begin; at < end; at += kChunk) {
    typename Row::Chunk chunk = end - at >= kChunk ? row.chunk(at / kChunk) : row.tail(at / kChunk, end - at);
    for (int j = 0; j < Row::kVecs; ++j, out += kLanes) store(out, Row::next(chunk));
    if constexpr (Row::kScaled) {
      store(out, chunk.scales);
      out += kLanes;
    }
  }
}

// One register tile of `rows` <= M rows of the buffered path: sums lie at sums[(m * kBlockColumns + n) *
// kLanes].
template <class Row, int M>
void buffered_tile(const float* const* x_rows, int64_t rows, const float* weights, int64_t depth,
                   float* sums) {
  if constexpr (M > 1) {
    if (rows < M) return buffered_tile<Row, M - 1>(x_rows, rows, weights, depth, sums);
  }
  const float* x[M];
  for (int m = 0; m < M; ++m) x[m] = x_rows[m];
  Vec tile[kTileColumns][M];
  for (int n = 0; n < kTileColumns; ++n) {
    for (int m = 0; m < M; ++m) tile[n][m] = load(sums + (m * kBlockColumns + n) * kLanes);
  }
  Row weight_rows[kTileColumns];
  for (int n = 0; n < kTileColumns; ++n) weight_rows[n] = Row(weights + n * kBufferedRow);
  add_columns<Row, M, kTileColumns>(weight_rows, x, depth, tile);
  for (int n = 0; n < kTileColumns; ++n) {
    for (int m = 0; m < M; ++m) store(sums + (m * kBlockColumns + n) * kLanes, tile[n][m]);
  }
}

template <class Row>
void buffered(const Block& block) {
  alignas(64) float weights[kBlockColumns * kBufferedRow];
  alignas(64) float sums[kBlockRows * kBlockColumns * kLanes];
  const int64_t row_floats = kBlockColumns * kLanes;
  for (int64_t i = 0; i < block.rows * row_floats; i += kLanes) store(sums + i, zero());
  // Columns of a last tile that do not exist run over zeros and are dropped.
  const int64_t tiles_columns = (block.columns + kTileColumns - 1) / kTileColumns * kTileColumns;
  for (int64_t begin = 0; begin < block.w.k; begin += kBlockDepth) {
    const int64_t end = block.w.k < begin + kBlockDepth ? block.w.k : begin + kBlockDepth;
    constexpr int64_t kChunk = Row::kVecs * kLanes;
    const int64_t depth = (end - begin + kChunk - 1) / kChunk * kChunk;
    for (int64_t n = 0; n < tiles_columns; ++n) {
      float* row = weights + n * kBufferedRow;
      if (n < block.columns) {
        decode(Row(block.w, block.first + n), begin, end, row);
      } else {
        for (int64_t i = 0; i < kBufferedRow; i += kLanes) store(row + i, zero());
      }
    }
    // Row tiles of nearly equal height: 8 rows are 4 + 4, not 6 + 2.
    const int64_t row_tiles = (block.rows + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0; tile < row_tiles; ++tile) {
      const int64_t r = block.rows * tile / row_tiles, next = block.rows * (tile + 1) / row_tiles;
      const float* x[kTileRows];
      for (int64_t m = 0; m < next - r; ++m) x[m] = packed_row(block.x, block.first_row + r + m) + begin;
      for (int64_t n = 0; n < block.columns; n += kTileColumns) {
        buffered_tile<typename Row::Buffered, kTileRows>(x, next - r, weights + n * kBufferedRow, depth,
                                                         sums + (r * kBlockColumns + n) * kLanes);
      }
    }
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    for (int64_t n = 0; n < block.columns; ++n) {
      block.out[r * block.out_stride + n] =
          sum(load(sums + (r * kBlockColumns + n) * kLanes)) * block.w.tensor_scale;
    }
  }
}

template <class Row>
void linear_block_of(const Block& block) {
  static_assert(kFusedRows <= 4);
  if (block.rows > kFusedRows || !Row::kFuses) return buffered<Row>(block);
  if constexpr (Row::kFuses) {
    if (block.rows == 1) return fused<Row, 1>(block);
    if constexpr (kFusedRows >= 2) {
      if (block.rows == 2) return fused<Row, 2>(block);
    }
    if constexpr (kFusedRows >= 3) {
      if (block.rows == 3) return fused<Row, 3>(block);
    }
    if constexpr (kFusedRows >= 4) {
      if (block.rows == 4) return fused<Row, 4>(block);
    }
  }
}

template <class Row>
void row_major_product(const Block& block) {
  for (int64_t n = 0; n < block.columns; n += kBlockColumns) {
    linear_block_of<Row>({block.w, block.x, block.first + n, smaller(kBlockColumns, block.columns - n),
                          block.first_row, block.rows, block.out + n, block.out_stride});
  }
}
