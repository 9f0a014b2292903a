// exp, silu and softplus on vectors; each lane by the same operations, so an element's bits do not depend on
// its place or on what lies beside it.

// exp(x): n = round(x / ln 2), r = x - n ln 2 in two steps (n times the high part is exact), the Taylor
// polynomial of degree 7 on |r| <= 0.3466 (truncation below 2^-27), times 2^n in two factors, so that
// overflow goes to infinity and underflow through the subnormals to 0. NaN stays NaN.
// Measured over all floats of [-104, 89]: at most 1.1 ulp with FMA, 1.6 without (2 ulp promised).
NIBBLE_INLINE Vec exp(Vec x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which sits in the lowest bits
  x = at_most(89.0f, at_least(-104.0f, x));
  Vec shifted = fma(x, splat(0x1.715476p0f), splat(kRound));  // 1 / ln 2
  Ints n = sub(bits(shifted), bits(splat(kRound)));
  Vec count = sub(shifted, splat(kRound));
  Vec r = fma(count, splat(-0x1.62e4p-1f), x);  // ln 2, 16 bits
  r = fma(count, splat(-0x1.7f7d1cp-20f), r);   // the rest of it
  Vec y = splat(1.0f / 5040.0f);
  y = fma(y, r, splat(1.0f / 720.0f));
  y = fma(y, r, splat(1.0f / 120.0f));
  y = fma(y, r, splat(1.0f / 24.0f));
  y = fma(y, r, splat(1.0f / 6.0f));
  y = fma(y, r, splat(0.5f));
  y = fma(y, r, splat(1.0f));
  y = fma(y, r, splat(1.0f));
  Ints half = shift_right<1>(n);
  Vec first = from_bits(shift_left<23>(add(half, splat_int(127))));
  Vec second = from_bits(shift_left<23>(add(sub(n, half), splat_int(127))));
  return mul(mul(y, first), second);
}

NIBBLE_INLINE Vec negate(Vec x) { return sub(zero(), x); }

// gate * sigmoid(x) * up = gate / (1 + exp(-x)) * up
NIBBLE_INLINE Vec sigmoid_mul(Vec gate, Vec x, Vec up) {
  return mul(div(gate, add(splat(1.0f), exp(negate(x)))), up);
}

// softplus(x) = max(x, 0) + log1p(u), u = exp(-|x|) in (0, 1]. log1p(u) = 2 atanh(s), s = u / (2 + u) <= 1/3,
// by the series s + s^3/3 + s^5/5 + ... to s^17/17 (truncation 2^-30 of s). About 3 ulp.
NIBBLE_INLINE Vec softplus(Vec x) {
  Vec magnitude = from_bits(bit_and(bits(x), splat_int(0x7FFFFFFF)));
  Vec u = exp(negate(magnitude));
  Vec s = div(u, add(splat(2.0f), u)), square = mul(s, s);
  Vec y = splat(1.0f / 17.0f);
  y = fma(y, square, splat(1.0f / 15.0f));
  y = fma(y, square, splat(1.0f / 13.0f));
  y = fma(y, square, splat(1.0f / 11.0f));
  y = fma(y, square, splat(1.0f / 9.0f));
  y = fma(y, square, splat(1.0f / 7.0f));
  y = fma(y, square, splat(1.0f / 5.0f));
  y = fma(y, square, splat(1.0f / 3.0f));
  y = fma(y, square, splat(1.0f));
  return add(at_least(0.0f, x), mul(add(s, s), y));
}
