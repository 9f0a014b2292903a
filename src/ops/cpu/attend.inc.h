// attend: some query heads of one row that share a key/value head, over a piece of the positions that the row
// sees, online softmax in float32.
//
//   for each block of 64 positions (aligned to multiples of 64, cut by first and last):
//     s_i = scale * q . k_i;  top' = max(top, s_i);  p_i = exp(s_i - top')
//     o = o * exp(top - top') + sum p_i v_i;  l = l * exp(top - top') + sum p_i
//
// What comes out is o, l and top; attend_join puts a row's pieces together in their order:
//
//   top' = max(top_a, top_b);  o = o_a * exp(top_a - top') + o_b * exp(top_b - top');  l alike
//
// and attend_finish divides. A sink is a state before the first piece: top = sink, l = 1, o = 0.
//
// The order follows from the positions alone (for chosen positions: from their places in the list), so pages,
// rings, chunks, other rows and how many heads go together change no bit. A block that does not raise the
// maximum multiplies by exp(0) = 1 exactly. Bytes: keys and values of the piece once from memory for all
// heads of a task, 4 * (head_dim + value_dim) a position; tiles of 4 positions x kAttendTileHeads heads read
// them from the caches. Limits: both dims 1..kMaxHeadDim, heads 1..kAttendHeads.

constexpr int64_t kAttendBlock = 64;
constexpr int64_t kTilePositions = 4;

// Where the block's keys and values lie.
struct AttendBlock {
  const float* keys[kAttendBlock];
  const float* values[kAttendBlock];
  int64_t low, high;  // of 64 the first and the last that count; those beside them in a tile repeat them
};

inline void find_block(const AttendTask& task, int64_t begin, AttendBlock& block) {
  block.low = task.first > begin ? task.first - begin : 0;
  block.high = task.last - begin < kAttendBlock ? task.last - begin : kAttendBlock - 1;
  const auto page_tokens = static_cast<uint32_t>(task.page_tokens);
  const auto table_pages = static_cast<uint32_t>(task.table_pages);
  uint32_t known_page = 0;
  const float* page_keys = nullptr;
  const float* page_values = nullptr;
  for (int64_t i = block.low; i <= block.high; ++i) {
    const auto position =
        static_cast<uint32_t>(task.positions != nullptr ? task.positions[begin + i] : begin + i);
    const uint32_t page = position / page_tokens, place = position % page_tokens;
    if (page_keys == nullptr || page != known_page) {
      const int64_t at = (task.table[page % table_pages] * task.kv_heads + task.kv_head) * task.page_tokens;
      page_keys = task.keys + at * task.head_dim;
      page_values = task.values + at * task.value_dim;
      known_page = page;
    }
    block.keys[i] = page_keys + place * task.head_dim;
    block.values[i] = page_values + place * task.value_dim;
  }
  for (int64_t i = 0; i < block.low; ++i) {
    block.keys[i] = block.keys[block.low], block.values[i] = block.values[block.low];
  }
  for (int64_t i = block.high + 1; i < kAttendBlock; ++i) {
    block.keys[i] = block.keys[block.high], block.values[i] = block.values[block.high];
  }
}

// scores[h * kAttendBlock + i] = q_h . k_i for H heads and the kTilePositions keys.
template <int H>
NIBBLE_INLINE void score_tile(const float* q, int64_t dim, const float* const* keys,
                              const float* const* ahead, float* scores) {
  Vec dots[H][kTilePositions];
  for (auto& of_head : dots) {
    for (Vec& dot : of_head) dot = zero();
  }
  const int64_t whole = dim / kLanes * kLanes, rest = dim - whole;
  for (int64_t c = 0; c < whole; c += kLanes) {
    Vec k[kTilePositions];
    for (int i = 0; i < kTilePositions; ++i) k[i] = load(keys[i] + c);
    if (ahead != nullptr) {
      for (int i = 0; i < kTilePositions; ++i) __builtin_prefetch(ahead[i] + c, 0, 2);
    }
    for (int h = 0; h < H; ++h) {
      const Vec query = load(q + h * dim + c);
      for (int i = 0; i < kTilePositions; ++i) dots[h][i] = fma(query, k[i], dots[h][i]);
    }
  }
  if (rest > 0) {
    for (int i = 0; i < kTilePositions; ++i) {
      const Vec k = load_tail(keys[i] + whole, rest);
      for (int h = 0; h < H; ++h) {
        dots[h][i] = fma(load_tail(q + h * dim + whole, rest), k, dots[h][i]);
      }
    }
  }
  for (int h = 0; h < H; ++h) {
    store_sums(scores + h * kAttendBlock, dots[h][0], dots[h][1], dots[h][2], dots[h][3]);
  }
}

// o[h][c] = o[h][c] * keep[h] + sum over i of p[h][i] * v_i[c] for H heads and N vectors of columns from
// `column`; of the last vector `last_lanes` count.
template <int H, int N>
NIBBLE_INLINE void value_tile(const AttendBlock& block, const AttendBlock* next, const float* p,
                              const float* keep, int64_t column, int64_t last_lanes, float* o,
                              int64_t o_stride) {
  Vec sums[H][N];
  for (int h = 0; h < H; ++h) {
    for (int j = 0; j < N; ++j) {
      sums[h][j] = mul(load(o + h * o_stride + column + j * kLanes), splat(keep[h]));
    }
  }
  for (int64_t i = block.low; i <= block.high; ++i) {
    const float* value = block.values[i] + column;
    Vec v[N];
    for (int j = 0; j < N; ++j) {
      v[j] = N > 1 || last_lanes == kLanes ? load(value + j * kLanes) : load_tail(value, last_lanes);
    }
    if (next != nullptr) {
      for (int j = 0; j < N; ++j) __builtin_prefetch(next->values[i] + column + j * kLanes, 0, 2);
    }
    for (int h = 0; h < H; ++h) {
      const Vec weight = splat(p[h * kAttendBlock + i]);
      for (int j = 0; j < N; ++j) sums[h][j] = fma(weight, v[j], sums[h][j]);
    }
  }
  for (int h = 0; h < H; ++h) {
    for (int j = 0; j < N; ++j) store(o + h * o_stride + column + j * kLanes, sums[h][j]);
  }
}

// Scores of the block's positions (in tiles that begin at `i`) for H heads.
template <int H>
void score_heads(const AttendTask& task, const AttendBlock& block, const AttendBlock* next, int64_t head,
                 int64_t i, float* scores) {
  score_tile<H>(task.q + head * task.head_dim, task.head_dim, block.keys + i,
                head == 0 && next != nullptr ? next->keys + i : nullptr, scores + head * kAttendBlock + i);
}

template <int H>
void value_heads(const AttendTask& task, const AttendBlock& block, const AttendBlock* next, int64_t head,
                 const float* p, const float* keep) {
  constexpr int N = 4;
  const int64_t width = task.value_dim;
  float* o = task.out + head * task.out_stride;
  p += head * kAttendBlock;
  keep += head;
  if (head > 0) next = nullptr;
  int64_t c = 0;
  for (; c + N * kLanes <= width; c += N * kLanes) {
    value_tile<H, N>(block, next, p, keep, c, kLanes, o, task.out_stride);
  }
  for (; c < width; c += kLanes) {
    value_tile<H, 1>(block, next, p, keep, c, smaller(kLanes, width - c), o, task.out_stride);
  }
}

// Calls Call::run<H>(head) for tiles of up to kAttendTileHeads of `heads`.
template <class Call>
NIBBLE_INLINE void for_head_tiles(int64_t heads, Call call) {
  int64_t head = 0;
  for (; head + kAttendTileHeads <= heads; head += kAttendTileHeads) {
    call.template operator()<kAttendTileHeads>(head);
  }
  for (; head < heads; ++head) call.template operator()<1>(head);
}

// p[i] = exp(scale * scores[i] - top') in place, and what that does to top and total; how much of o stays.
inline float soften(const AttendBlock& block, float scale, float* scores, float& top, float& total) {
  for (int64_t i = 0; i < kAttendBlock; i += kLanes) store(scores + i, mul(load(scores + i), splat(scale)));
  for (int64_t i = 0; i < block.low; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = block.high + 1; i < kAttendBlock; ++i) scores[i] = -__builtin_inff();
  Vec tops = splat(top);
  for (int64_t i = 0; i < kAttendBlock; i += kLanes) tops = max(load(scores + i), tops);
  alignas(64) float lanes[kLanes];
  store(lanes, tops);
  float block_top = lanes[0];
  for (float lane : lanes) block_top = lane > block_top ? lane : block_top;
  const Vec subtract = splat(block_top);
  Vec sums = zero();
  for (int64_t i = 0; i < kAttendBlock; i += kLanes) {
    const Vec weights = exp(sub(load(scores + i), subtract));
    store(scores + i, weights);
    sums = add(sums, weights);
  }
  store(lanes, exp(sub(splat(top), subtract)));
  total = total * lanes[0] + sum(sums);
  top = block_top;
  return lanes[0];
}

void attend(const AttendTask& task) {
  alignas(64) float scores[kAttendHeads * kAttendBlock];
  float keep[kAttendHeads];
  AttendBlock blocks[2];
  for (int64_t h = 0; h < task.heads; ++h) {
    task.top[h] = -__builtin_inff();
    task.total[h] = 0;
    for (int64_t c = 0; c < task.out_stride; c += kLanes) store(task.out + h * task.out_stride + c, zero());
  }
  int64_t begin = task.first / kAttendBlock * kAttendBlock;
  find_block(task, begin, blocks[0]);
  for (int turn = 0; begin <= task.last; begin += kAttendBlock, turn ^= 1) {
    const AttendBlock& block = blocks[turn];
    // Pages are too short for the hardware's prefetchers: the next block is asked for meanwhile.
    AttendBlock* next = begin + kAttendBlock <= task.last ? &blocks[turn ^ 1] : nullptr;
    if (next != nullptr) find_block(task, begin + kAttendBlock, *next);
    for (int64_t i = block.low / kTilePositions * kTilePositions; i <= block.high; i += kTilePositions) {
      for_head_tiles(task.heads,
                     [&]<int H>(int64_t head) { score_heads<H>(task, block, next, head, i, scores); });
    }
    for (int64_t h = 0; h < task.heads; ++h) {
      keep[h] = soften(block, task.scale, scores + h * kAttendBlock, task.top[h], task.total[h]);
    }
    for_head_tiles(task.heads,
                   [&]<int H>(int64_t head) { value_heads<H>(task, block, next, head, scores, keep); });
  }
}

void attend_join(const float* piece, float piece_top, float piece_total, int64_t n, float* o, float* top,
                 float* total) {
  const float joined = piece_top > *top ? piece_top : *top;
  alignas(64) float lanes[kLanes] = {*top - joined, piece_top - joined};
  store(lanes, exp(load(lanes)));
  const Vec keep = splat(lanes[0]), take = splat(lanes[1]);
  map(o, piece, n, o, [keep, take](Vec a, Vec b) { return fma(b, take, mul(a, keep)); });
  *total = *total * lanes[0] + piece_total * lanes[1];
  *top = joined;
}

void attend_finish(float total, int64_t n, float* o) {
  const Vec divisor = splat(total);
  map(o, n, o, [divisor](Vec a) { return div(a, divisor); });
}
