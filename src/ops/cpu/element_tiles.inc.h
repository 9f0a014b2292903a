// A block of linear for up to Product::kMostRows activation rows and weights with a code for each element
// (F32, F16, BF16, E4M3 without block scales; pairs of BF16): with so few rows a decoded copy of the weights,
// as the buffered path makes it, costs more than the products. Each tile of up to Row::kTileRows x
// kElementTileColumns goes over all of K and decodes in registers; the order of the sum is that of
// linear.inc.h, and so are the bits.
//
// A tile's weight rows are read side by side, and the next tile's are asked for meanwhile: rows are too short
// for the hardware's prefetchers, which start again for each. Bytes: the weights once, the activations once
// for each kElementTileColumns weight rows, out of L2.

// Weight rows of a tile of `rows`. A single row waits for memory, which two streams and what is asked for
// ahead of them keep busiest.
constexpr int element_tile_columns(int64_t rows) { return rows == 1 ? 2 : kElementTileColumns; }

// The columns [0, k) of M activation rows x N weight rows.
template <class Format, class Product, int M, int N>
NIBBLE_INLINE void add_row(const ElementRow<Format, Product> (&rows)[N], const float* const (&x)[M],
                           int64_t k, Vec (&sums)[N][M]) {
  using Row = ElementRow<Format, Product>;
  constexpr int64_t kStep = 64 / static_cast<int64_t>(sizeof(typename Row::Code));  // columns of a cache line
  typename Row::Chunk chunk[N];
  int64_t begin = 0;
  for (; begin + kStep <= k; begin += kStep) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) rows[n].prefetch(N * k + begin);
#pragma GCC unroll 4
    for (int64_t column = begin; column < begin + kStep; column += kLanes) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) chunk[n] = rows[n].chunk(column / kLanes);
      add_chunk<Row, M, N>(chunk, x, column, sums);
    }
  }
  for (; begin < k; begin += kLanes) {
    for (int n = 0; n < N; ++n) {
      chunk[n] =
          begin + kLanes <= k ? rows[n].chunk(begin / kLanes) : rows[n].tail(begin / kLanes, k - begin);
    }
    add_chunk<Row, M, N>(chunk, x, begin, sums);
  }
}

// A last tile with fewer weight rows computes its last one again and drops it.
template <class Row, int M>
void element_tile(const Block& block, int64_t first_row, int64_t n0) {
  constexpr int N = element_tile_columns(M);
  const float* x[M];
  for (int m = 0; m < M; ++m) x[m] = packed_row(block.x, block.first_row + first_row + m);
  Row rows[N];
  for (int n = 0; n < N; ++n) rows[n] = Row(block.w, block.first + smaller(n0 + n, block.columns - 1));
  Vec sums[N][M];
  for (auto& column : sums) {
    for (Vec& s : column) s = zero();
  }
  add_row(rows, x, block.w.k, sums);
  for (int64_t n = 0; n < N && n0 + n < block.columns; ++n) {
    for (int m = 0; m < M; ++m) {
      block.out[(first_row + m) * block.out_stride + n0 + n] = sum(sums[n][m]) * block.w.tensor_scale;
    }
  }
}

// REQUIRES 1 <= rows <= M.
template <class Row, int M>
void element_tile_of(const Block& block, int64_t first_row, int64_t rows, int64_t n0) {
  if constexpr (M > 1) {
    if (rows < M) return element_tile_of<Row, M - 1>(block, first_row, rows, n0);
  }
  element_tile<Row, M>(block, first_row, n0);
}

template <class Row>
void element_block(const Block& block) {
  // Row tiles of nearly equal height.
  constexpr int kTileRows = Row::kTileRows;
  const int64_t tiles = (block.rows + kTileRows - 1) / kTileRows;
  for (int64_t n = 0; n < block.columns; n += element_tile_columns(block.rows)) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = block.rows * tile / tiles, next = block.rows * (tile + 1) / tiles;
      element_tile_of<Row, kTileRows>(block, row, next - row, n);
    }
  }
}

// Any number of activation rows.
template <class Row>
void product_of_rows(const Block& block) {
  if (block.rows <= Row::Product::kMostRows) return element_block<Row>(block);
  row_major_product<Row>(block);
}
