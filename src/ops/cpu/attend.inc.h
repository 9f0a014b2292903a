// attend: one query head of one row over the visible positions, online softmax in float32.
//
//   for each block of 64 positions (aligned to multiples of 64 from position 0, cut by first and last):
//     s_i = scale * q . k_i;  top' = max(top, s_i);  p_i = exp(s_i - top')
//     o = o * exp(top - top') + sum p_i v_i;  l = l * exp(top - top') + sum p_i
//   out = o / l
//
// A sink is where it starts: top = sink, l = exp(sink - top) = 1; without one top = -infinity, l = 0.
//
// The order follows from the positions alone, so pages, rings, chunks and other rows change no bit. A block
// that does not raise the maximum multiplies by exp(0) = 1 exactly. Bytes: keys and values of the visible
// positions once, 4 * (head_dim + value_dim) a position. Limits: both dims 1..kMaxHeadDim.

constexpr int64_t kAttendBlock = 64;

// o[c] = o[c] * keep + sum over i of p[i] * v_i[c] for N vectors of columns from `column`.
template <int N>
inline void add_values(const float* const* v, const float* p, int64_t count, int64_t column, Vec keep,
                       float* o) {
  Vec sums[N];
  for (int j = 0; j < N; ++j) sums[j] = mul(load(o + column + j * kLanes), keep);
  for (int64_t i = 0; i < count; ++i) {
    const Vec weight = splat(p[i]);
    for (int j = 0; j < N; ++j) sums[j] = fma(weight, load(v[i] + column + j * kLanes), sums[j]);
  }
  for (int j = 0; j < N; ++j) store(o + column + j * kLanes, sums[j]);
}

void attend(const AttendTask& task) {
  const int64_t dim = task.head_dim, whole = dim / kLanes * kLanes, rest = dim - whole;
  const int64_t width = task.value_dim, whole_value = width / kLanes * kLanes,
                value_rest = width - whole_value;
  alignas(64) float q[kMaxHeadDim + kLanes];
  alignas(64) float o[kMaxHeadDim + kLanes];
  alignas(64) float p[kAttendBlock];
  const float* keys[kAttendBlock];
  const float* values[kAttendBlock];
  for (int64_t c = 0; c < whole; c += kLanes) {
    store(q + c, load(task.q + c));
  }
  if (rest > 0) store(q + whole, load_tail(task.q + whole, rest));
  for (int64_t c = 0; c < width; c += kLanes) store(o + c, zero());
  float top = task.sink != nullptr ? *task.sink : -__builtin_inff();
  float total = task.sink != nullptr ? 1.0f : 0.0f;
  for (int64_t begin = task.first; begin <= task.last;) {
    const int64_t aligned_end = (begin / kAttendBlock + 1) * kAttendBlock;
    const int64_t end = aligned_end <= task.last ? aligned_end : task.last + 1;
    const int64_t count = end - begin;
    float block_top = top;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = begin + i;
      const int64_t page = task.table[position / task.page_tokens % task.table_pages];
      const int64_t at =
          (page * task.kv_heads + task.kv_head) * task.page_tokens + position % task.page_tokens;
      keys[i] = task.keys + at * dim;
      values[i] = task.values + at * width;
      Vec dot = zero();
      for (int64_t c = 0; c < whole; c += kLanes) dot = fma(load(q + c), load(keys[i] + c), dot);
      if (rest > 0) dot = fma(load(q + whole), load_tail(keys[i] + whole, rest), dot);
      p[i] = sum(dot) * task.scale;
      block_top = p[i] > block_top ? p[i] : block_top;
    }
    for (int64_t i = count; i < kAttendBlock; ++i) p[i] = -__builtin_inff();
    const Vec subtract = splat(block_top);
    Vec sums = zero();
    for (int64_t i = 0; i < kAttendBlock; i += kLanes) {
      const Vec weights = exp(sub(load(p + i), subtract));
      store(p + i, weights);
      sums = add(sums, weights);
    }
    const Vec keep = exp(sub(splat(top), subtract));
    alignas(64) float keep_lanes[kLanes];
    store(keep_lanes, keep);
    total = total * keep_lanes[0] + sum(sums);
    top = block_top;
    int64_t c = 0;
    for (; c + 4 * kLanes <= whole_value; c += 4 * kLanes) add_values<4>(values, p, count, c, keep, o);
    for (; c < whole_value; c += kLanes) add_values<1>(values, p, count, c, keep, o);
    if (value_rest > 0) {
      Vec sums_of_rest = mul(load(o + whole_value), keep);
      for (int64_t i = 0; i < count; ++i) {
        sums_of_rest = fma(splat(p[i]), load_tail(values[i] + whole_value, value_rest), sums_of_rest);
      }
      store(o + whole_value, sums_of_rest);
    }
    begin = end;
  }
  const Vec divisor = splat(total);
  map(o, width, task.out, [divisor](Vec a) { return div(a, divisor); });
}
