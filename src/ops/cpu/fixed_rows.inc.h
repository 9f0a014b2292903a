// Rows in fixed point: what FixedGroup and Int8Group say, by the same bits on every instruction set.

// Makes of columns of at most 2^22 the numbers whose nearest integers are q.
inline void scale_blocks(float* /*values*/, FixedGroup& /*out*/) {}
inline void scale_blocks(float* values, Int8Group& out) {
  for (float& scale : out.block_scales) {
    const Vec low = load(values), high = load(values + kLanes);
    auto magnitude = [](Vec v) { return from_bits(bit_and(bits(v), splat_int(0x7FFFFFFF))); };
    alignas(64) float lanes[kLanes];
    store(lanes, max(magnitude(low), magnitude(high)));
    for (float lane : lanes) lanes[0] = lane > lanes[0] ? lane : lanes[0];
    // Below 2^-100 of what the group's largest is, columns are nothing, and the inverse might be infinite.
    const float largest = lanes[0] > 0x1p-78f ? lanes[0] : 0.0f;
    const Vec inverse = splat(largest > 0 ? 127.0f / largest : 0.0f);
    scale = largest / 127.0f;
    store(values, mul(low, inverse));
    store(values + kLanes, mul(high, inverse));
    values += Int8Group::kBlockColumns;
  }
}

// At most 128 columns; those that are not there are zeros.
template <class Group>
void fixed_group(const float* x, int64_t columns, Group& out) {
  alignas(64) float values[kPackedColumns] = {};
  __builtin_memcpy(values, x, static_cast<uint64_t>(columns) * sizeof(float));
  Vec largest = zero(), nothing = zero();  // the second is NaN where a column is not finite
  for (int64_t i = 0; i < kPackedColumns; i += kLanes) {
    const Vec v = load(values + i);
    largest = max(largest, from_bits(bit_and(bits(v), splat_int(0x7FFFFFFF))));
    nothing = add(nothing, mul(v, zero()));
  }
  const float not_finite = sum(nothing);
  if (not_finite != 0.0f) {
    __builtin_memset(&out, 0, sizeof(out));
    out.scale = not_finite;
    return;
  }
  alignas(64) float lanes[kLanes];
  store(lanes, largest);
  for (float lane : lanes) lanes[0] = lane > lanes[0] ? lane : lanes[0];
  int32_t largest_bits = 0;
  __builtin_memcpy(&largest_bits, lanes, sizeof(largest_bits));
  // largest < 2^(exponent - 126), and scale = 2^(exponent - 148) makes a q below 2^22 of it. Below 2^-126 the
  // scale is no normal float, and its inverse none at all: such rows are multiplied by 2^64 first.
  int32_t exponent = largest_bits >> 23;
  int32_t scale_bits = (exponent - 21) << 23;
  if (exponent < 22) {
    scale_bits = 1 << (exponent + 1);
    for (int64_t i = 0; i < kPackedColumns; i += kLanes)
      store(values + i, mul(load(values + i), splat(0x1p64f)));
    exponent += 64;
  }
  const int32_t inverse_bits = (275 - exponent) << 23;
  __builtin_memcpy(&out.scale, &scale_bits, sizeof(out.scale));
  const Vec inverse = from_bits(splat_int(inverse_bits));
  for (int64_t i = 0; i < kPackedColumns; i += kLanes) store(values + i, mul(load(values + i), inverse));
  scale_blocks(values, out);
  const Vec round = splat(0x1.8p23f);  // adding it rounds to an integer, which sits in the lowest bits
  for (int64_t set = 0; set < Group::kSets; ++set) {
    Ints q = sub(bits(add(load(values + set * kLanes), round)), bits(round));
    int32_t all[kLanes], total = 0;
    store(all, q);
    for (int32_t one : all) total += one;
    out.starts[set] = -12 * total;
    // A digit of -128..127 is the lowest byte; half of 256 more rounds the rest to the nearest.
    for (int digit = Group::kDigits - 1; digit >= 0; --digit) {
      store_digits(out.digits[set][digit], q);
      q = shift_right<8>(add(q, splat_int(128)));
    }
  }
}

template <class Group>
void pack_groups(const float* x, int64_t k, float* packed) {
  Group* groups = reinterpret_cast<Group*>(packed);
  for (int64_t at = 0; at < k; at += kPackedColumns)
    fixed_group(x + at, smaller(kPackedColumns, k - at), groups[at / kPackedColumns]);
}

void pack_plain(const float* x, int64_t k, float* packed) {
  const int64_t padded = (k + kPackedColumns - 1) / kPackedColumns * kPackedColumns;
  __builtin_memcpy(packed, x, static_cast<uint64_t>(k) * sizeof(float));
  for (int64_t i = k; i < padded; ++i) packed[i] = 0.0f;
}

void pack(Packing packing, const float* x, int64_t k, float* packed) {
  switch (packing) {
    case Packing::kPlain:
      return pack_plain(x, k, packed);
    case Packing::kFixed:
      return pack_groups<FixedGroup>(x, k, packed);
    case Packing::kInt8:
      return pack_groups<Int8Group>(x, k, packed);
    case Packing::kPairs:
      return pack_pairs(x, k, packed);
  }
}
