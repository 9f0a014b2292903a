// Recurrent layers, residual streams and the pools of sparse attention. The formulas are those of
// ops/mixer_args.h; sums are in float32 in the orders given here, for any number of rows and threads.

inline float first_lane(Vec a) {
  alignas(64) float lanes[kLanes];
  store(lanes, a);
  return lanes[0];
}
NIBBLE_INLINE Vec sigmoid(Vec x) { return div(splat(1.0f), add(splat(1.0f), exp(negate(x)))); }

void sigmoid_array(const float* x, int64_t n, float* out) {
  map(x, n, out, [](Vec a) { return sigmoid(a); });
}

// out[i] = x[i] / sqrt(sum x^2 + 1e-6) * scale, and zeros up to a whole vector.
inline void normalize(const float* x, int64_t n, float scale, float* out) {
  Vec squares = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec a = load_up_to(x + i, n - i);
    squares = fma(a, a, squares);
  }
  const Vec factor = splat(1.0f / __builtin_sqrtf(sum(squares) + 1e-6f) * scale);
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, mul(load_up_to(x + i, n - i), factor));
}

// N vectors of value columns of a state, one token on. Columns do not depend on each other, so these stay in
// the first-level cache between the two passes over them, and the state is read and written once. Two sums,
// of even and of odd keys, keep enough FMAs in flight.
template <int N, class Get, class Put>
NIBBLE_INLINE void kda_columns(const KdaTask& task, const float* q, const float* k, const float* keep,
                               float beta, int64_t column, Get get, Put put) {
  const int64_t dim = task.dim;
  Vec even[N], odd[N], delta[N];
  auto clear = [&] {
    for (int j = 0; j < N; ++j) even[j] = odd[j] = zero();
  };
  auto decayed = [&](int64_t i, int j) { return mul(get(task.state + i * dim + column, j), splat(keep[i])); };
  auto recall = [&](int64_t i, Vec* sums) {
    for (int j = 0; j < N; ++j) sums[j] = fma(decayed(i, j), splat(k[i]), sums[j]);
  };
  auto renew = [&](int64_t i, Vec* sums) {
    for (int j = 0; j < N; ++j) {
      const Vec next = fma(splat(k[i]), delta[j], decayed(i, j));
      put(task.state + i * dim + column, j, next);
      sums[j] = fma(next, splat(q[i]), sums[j]);
    }
  };
  clear();
  int64_t i = 0;
  for (; i + 2 <= dim; i += 2) recall(i, even), recall(i + 1, odd);
  if (i < dim) recall(i, even);
  for (int j = 0; j < N; ++j) {
    delta[j] = mul(splat(beta), sub(get(task.v + column, j), add(even[j], odd[j])));
  }
  clear();
  for (i = 0; i + 2 <= dim; i += 2) renew(i, even), renew(i + 1, odd);
  if (i < dim) renew(i, even);
  for (int j = 0; j < N; ++j) put(task.out + column, j, add(even[j], odd[j]));
}

// Bytes: 8 * dim^2, the state in and out.
void kda(const KdaTask& task) {
  alignas(64) float q[kMaxHeadDim + kLanes];
  alignas(64) float k[kMaxHeadDim + kLanes];
  alignas(64) float keep[kMaxHeadDim + kLanes];
  const int64_t dim = task.dim;
  normalize(task.q, dim, 1.0f / __builtin_sqrtf(static_cast<float>(dim)), q);
  normalize(task.k, dim, 1.0f, k);
  const Vec rate = exp(splat(task.a_log));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec u = add(load_up_to(task.decay + i, dim - i), load_up_to(task.dt_bias + i, dim - i));
    const Vec g = task.gate_lower_bound != nullptr ? mul(splat(*task.gate_lower_bound), sigmoid(mul(rate, u)))
                                                   : mul(negate(rate), softplus(u));
    store(keep + i, exp(g));
  }
  const float beta = first_lane(sigmoid(splat(task.beta)));
  constexpr int N = 4;
  auto get = [](const float* p, int j) { return load(p + j * kLanes); };
  auto put = [](float* p, int j, Vec a) { store(p + j * kLanes, a); };
  int64_t c = 0;
  for (; c + N * kLanes <= dim; c += N * kLanes) kda_columns<N>(task, q, k, keep, beta, c, get, put);
  for (; c < dim; c += kLanes) {
    const int64_t n = dim - c;
    kda_columns<1>(
        task, q, k, keep, beta, c, [n](const float* p, int /*j*/) { return load_up_to(p, n); },
        [n](float* p, int /*j*/, Vec a) { n >= kLanes ? store(p, a) : store_tail(p, n, a); });
  }
}

// out[c] = silu(sum_j weight[j][c] * input j back in time), the oldest first; the state moves on by one.
void causal_conv(const ConvTask& task) {
  const int64_t kept = task.taps - 1;
  for (int64_t c = 0; c < task.n; c += kLanes) {
    const int64_t n = task.n - c;
    auto put = [n](float* p, Vec a) { n >= kLanes ? store(p, a) : store_tail(p, n, a); };
    Vec y = zero();
    for (int64_t j = 0; j < kept; ++j) {
      const Vec past = load_up_to(task.state + j * task.state_stride + c, n);
      y = fma(load_up_to(task.weight + j * task.n + c, n), past, y);
      if (j > 0) put(task.state + (j - 1) * task.state_stride + c, past);
    }
    const Vec input = load_up_to(task.x + c, n);
    y = fma(load_up_to(task.weight + kept * task.n + c, n), input, y);
    put(task.state + (kept - 1) * task.state_stride + c, input);
    put(task.out + c, sigmoid_mul(y, y, splat(1.0f)));
  }
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias; both sums in lanes.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
  Vec sums = zero();
  for (int64_t i = 0; i < n; i += kLanes) sums = add(sums, load_up_to(x + i, n - i));
  const Vec mean = splat(sum(sums) / static_cast<float>(n));
  Vec squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec off = sub(load(x + i), mean);
    squares = fma(off, off, squares);
  }
  float rest = 0;
  for (; i < n; ++i) {
    const float off = x[i] - first_lane(mean);
    rest += off * off;
  }
  const Vec scale = splat(1.0f / __builtin_sqrtf((sum(squares) + rest) / static_cast<float>(n) + eps));
  for (i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    const Vec y = fma(mul(sub(load_up_to(x + i, left), mean), scale), load_up_to(weight + i, left),
                      load_up_to(bias + i, left));
    left >= kLanes ? store(out + i, y) : store_tail(out + i, left, y);
  }
}

// out = sum_i weights[i] * stream i, streams `width` apart.
void hyper_collect(const float* streams, const float* weights, int64_t count, int64_t width, float* out) {
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec y = zero();
    for (int64_t i = 0; i < count; ++i) {
      y = fma(splat(weights[i]), load_up_to(streams + i * width + d, width - d), y);
    }
    width - d >= kLanes ? store(out + d, y) : store_tail(out + d, width - d, y);
  }
}

// stream i = post[i] * y + sum_j comb[j][i] * stream j, in place.
void hyper_distribute(const float* y, const float* post, const float* comb, int64_t count, int64_t width,
                      float* streams) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const int64_t n = width - d;
    const Vec added = load_up_to(y + d, n);
    Vec before[kMaxStreams];
    for (int64_t j = 0; j < count; ++j) before[j] = load_up_to(streams + j * width + d, n);
    for (int64_t i = 0; i < count; ++i) {
      Vec after = mul(splat(post[i]), added);
      for (int64_t j = 0; j < count; ++j) after = fma(splat(comb[j * count + i]), before[j], after);
      float* place = streams + i * width + d;
      n >= kLanes ? store(place, after) : store_tail(place, n, after);
    }
  }
}

// keys_out[p] = sum_j softmax_j(gate_j + ape_j) * key_j of the task's pools, channel by channel.
void pool_keys(const PoolTask& task) {
  constexpr int64_t kAhead = 4;  // pools whose tokens are asked for before they are read
  for (int64_t p = 0; p < task.count; ++p) {
    const int64_t* tokens = task.tokens + p * task.pool;
    const int64_t* later = task.tokens + smaller(p + kAhead, task.count - 1) * task.pool;
    for (int64_t c = 0; c < task.dim; c += kLanes) {
      const int64_t n = task.dim - c;
      auto logit = [&](int64_t j) {
        return add(load_up_to(task.gates + tokens[j] * task.dim + c, n),
                   load_up_to(task.ape + j * task.dim + c, n));
      };
      Vec top = logit(0);
      for (int64_t j = 1; j < task.pool; ++j) top = max(top, logit(j));
      Vec total = zero(), key = zero();
      for (int64_t j = 0; j < task.pool; ++j) {
        __builtin_prefetch(task.gates + later[j] * task.dim + c, 0, 2);
        __builtin_prefetch(task.keys + later[j] * task.dim + c, 0, 2);
        const Vec weight = exp(sub(logit(j), top));
        total = add(total, weight);
        key = fma(weight, load_up_to(task.keys + tokens[j] * task.dim + c, n), key);
      }
      key = div(key, total);
      float* out = task.keys_out + p * task.dim + c;
      n >= kLanes ? store(out, key) : store_tail(out, n, key);
    }
  }
}

// scores[p] = sum_h weights[h] * relu(q_h . keys[p] * scale), heads in their order; count <= kAttendBlock.
void pool_scores(const float* q, const float* weights, int64_t heads, int64_t dim, float scale,
                 const float* keys, int64_t count, float* scores) {
  static_assert(kPoolsAtOnce == kAttendBlock);
  alignas(64) float dots[kAttendTileHeads * kAttendBlock] = {};
  alignas(64) float sums[kAttendBlock] = {};
  const float* rows[kAttendBlock];
  for (int64_t p = 0; p < kAttendBlock; ++p) rows[p] = keys + (p < count ? p : count - 1) * dim;
  for_head_tiles(heads, [&]<int H>(int64_t head) {
    for (int64_t p = 0; p < count; p += kTilePositions) {
      score_tile<H>(q + head * dim, dim, rows + p, nullptr, dots + p);
    }
    for (int h = 0; h < H; ++h) {
      const Vec weight = splat(weights[head + h]);
      for (int64_t p = 0; p < kAttendBlock; p += kLanes) {
        const Vec dot = mul(load(dots + h * kAttendBlock + p), splat(scale));
        store(sums + p, fma(weight, at_least(0.0f, dot), load(sums + p)));
      }
    }
  });
  for (int64_t p = 0; p < count; ++p) scores[p] = sums[p];
}
