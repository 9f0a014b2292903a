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

// Asks for a cache line of weights that are read line by line, while `line` is. Where there is AMX a core's
// prefetchers keep up with a stream only if it has several at once, and start again on each page: so the next
// 16 KB are asked for as four streams, a page each, in turn (NVFP4 at one row, two threads: 15 GB/s without,
// 26 with 4 KB ahead in order, 32). Zen 4 follows one stream by itself; there asking was up to 8% slower.
// Past the end it asks for what another task is about to read, or for nothing that exists.
NIBBLE_INLINE void ask_ahead([[maybe_unused]] const uint8_t* line) {
#if defined(NIBBLE_AMX)
  constexpr uint64_t kLine = 64, kPages = 4, kPage = 4096, kAhead = kPages * kPage;
  const auto at = reinterpret_cast<uint64_t>(line), i = at / kLine % (kAhead / kLine);
  const uint64_t ahead = at / kAhead * kAhead + kAhead + i % kPages * kPage + i / kPages * kLine;
  __builtin_prefetch(reinterpret_cast<const void*>(ahead));  // NOLINT(performance-no-int-to-ptr)
#endif
}
