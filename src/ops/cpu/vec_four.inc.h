// What the instruction sets share whose 16 lanes are four registers. Included by their vec_<isa>.h after Vec
// and Ints, which undefines the macro at its end.

// A new vector of type T whose part i is `expression`. A call for each part, not a loop: GCC keeps the parts
// in registers only if it sees constant indices before it takes structs apart.
// NOLINTBEGIN(bugprone-macro-parentheses): T is a type.
#define NIBBLE_EACH_PART(T, expression)                                          \
  auto part_ = [&](int i) __attribute__((always_inline)) { return expression; }; \
  return T {                                                                     \
    { part_(0), part_(1), part_(2), part_(3) }                                   \
  }
// NOLINTEND(bugprone-macro-parentheses)

// What is loaded already, where the compiler would use an array's element in place instead; a hint, for
// instruction sets with registers to spare.
NIBBLE_INLINE Vec in_register(Vec a) { return a; }

NIBBLE_INLINE Vec load(const float* p);
NIBBLE_INLINE void store(float* p, Vec a);

// The first n < 16 lanes; the others are zero, and memory past p + n is not touched.
NIBBLE_INLINE Vec load_tail(const float* p, int64_t n) {
  float padded[16] = {};
  __builtin_memcpy(padded, p, static_cast<uint64_t>(n) * sizeof(float));
  return load(padded);
}
NIBBLE_INLINE void store_tail(float* p, int64_t n, Vec a) {
  float all[16];
  store(all, a);
  __builtin_memcpy(p, all, static_cast<uint64_t>(n) * sizeof(float));
}
