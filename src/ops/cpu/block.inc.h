// A part of a product, as both kinds of kernels (linear.inc.h, tiles.inc.h) take it.

constexpr int64_t kBlockRows = 128;  // activation rows of a block

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline const float* packed_row(const PackedRows& x, int64_t r) {
  return x.x + (x.index != nullptr ? x.index[r] : r) * x.stride;
}

// out[r * out_stride + n] of `rows` activation rows and `columns` weight rows.
struct Block {
  const Weights& w;
  const PackedRows& x;
  int64_t first, columns;   // weight rows
  int64_t first_row, rows;  // activation rows; at most kBlockRows
  float* out;               // of activation row first_row and weight row first
  int64_t out_stride;
};

// How a vector of a weight row and one of an activation row go into a sum; and the tiles of
// element_tiles.inc.h that are quickest so.
struct Fma {
  static constexpr int kTileRows = kElementTileRows, kMostRows = kElementRows;
  static NIBBLE_INLINE Vec add(Vec w, Vec x, Vec sum) { return fma(w, x, sum); }
};
