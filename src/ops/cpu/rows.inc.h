// Operations on one row or array, memory-bound: each reads its operands once and writes once.

NIBBLE_INLINE Vec load_up_to(const float* p, int64_t n) { return n >= kLanes ? load(p) : load_tail(p, n); }

// out[i] = f(a[i]) and out[i] = f(a[i], b[i]); out may be a or b.
template <class F>
inline void map(const float* a, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, f(load(a + i)));
  if (i < n) store_tail(out + i, n - i, f(load_tail(a + i, n - i)));
}
template <class F>
inline void map(const float* a, const float* b, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, f(load(a + i), load(b + i)));
  if (i < n) store_tail(out + i, n - i, f(load_tail(a + i, n - i), load_tail(b + i, n - i)));
}

void exp_array(const float* x, int64_t n, float* out) {
  map(x, n, out, [](Vec a) { return exp(a); });
}
void softplus_array(const float* x, int64_t n, float* out) {
  map(x, n, out, [](Vec a) { return softplus(a); });
}
// ActivationSpec says the formulas.
void activate(const ActivationSpec& spec, const float* gate, const float* up, int64_t n, float* out) {
  const float limit = spec.limit;
  switch (spec.kind) {
    case ActivationSpec::kSilu:
      return map(gate, up, n, out, [](Vec g, Vec u) { return sigmoid_mul(g, g, u); });
    case ActivationSpec::kSiluClamped:
      return map(gate, up, n, out, [limit](Vec g, Vec u) {
        g = at_most(limit, g);
        return sigmoid_mul(g, g, at_most(limit, at_least(-limit, u)));
      });
    case ActivationSpec::kGptOss:
      return map(gate, up, n, out, [limit, alpha = splat(spec.alpha)](Vec g, Vec u) {
        g = at_most(limit, g);
        return sigmoid_mul(g, mul(alpha, g), add(at_most(limit, at_least(-limit, u)), splat(1.0f)));
      });
  }
}
void add_array(const float* y, int64_t n, float* x) {
  map(x, y, n, x, [](Vec a, Vec b) { return add(a, b); });
}
// Not FMA: the default body of expert_ffn rounds the product too.
void add_scaled(const float* y, float weight, int64_t n, float* x) {
  map(x, y, n, x, [factor = splat(weight)](Vec a, Vec b) { return add(a, mul(factor, b)); });
}
void multiply(const float* y, int64_t n, float* x) {
  map(x, y, n, x, [](Vec a, Vec b) { return mul(a, b); });
}
void multiply_by(float factor, int64_t n, float* x) {
  map(x, n, x, [f = splat(factor)](Vec a) { return mul(a, f); });
}

// Of x * factor.
inline float sum_of_squares(const float* x, float factor, int64_t n) {
  Vec squares = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = mul(load_up_to(x + i, n - i), splat(factor));
    squares = fma(v, v, squares);
  }
  return sum(squares);
}

// out = x / sqrt(mean(x^2) + eps) * weight. The squares are summed in float32, lane i taking every 16th; of a
// row whose squares are beyond float32, those of a small power of two of it.
void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  float factor = 1.0f, squares = sum_of_squares(x, factor, n);
  if (squares > 0x1.fffffep127f) {
    factor = 0x1p-70f;
    squares = sum_of_squares(x, factor, n);
  }
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps * factor * factor);
  map(x, weight, n, out, [small = splat(factor), scale = splat(scale)](Vec a, Vec w) {
    return mul(mul(mul(a, small), scale), w);
  });
}

// (a, b) -> (a cos - b sin, b cos + a sin), each product rounded.
void rope(float* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i < kLanes ? half - i : kLanes;
    auto get = [n](const float* p) { return n == kLanes ? load(p) : load_tail(p, n); };
    auto put = [n](float* p, Vec value) { n == kLanes ? store(p, value) : store_tail(p, n, value); };
    const Vec a = get(head + i), b = get(head + half + i), c = get(cosines + i), s = get(sines + i);
    put(head + i, sub(mul(a, c), mul(b, s)));
    put(head + half + i, add(mul(b, c), mul(a, s)));
  }
}

// The same for pairs of neighbours. In scalar code: a head is a few dozen elements, once a layer.
void rope_interleaved(float* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = a * cosines[i] - b * sines[i];
    head[2 * i + 1] = b * cosines[i] + a * sines[i];
  }
}
