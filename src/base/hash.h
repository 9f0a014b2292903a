// A 64-bit hash to tell whole files from torn ones. Against accidents, not against malice; the same on every
// machine of this byte order, and not meant to be kept beyond one job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace nibble {

// The hash of `bytes`, going on from `seed`.
inline uint64_t hash_bytes(std::span<const std::byte> bytes, uint64_t seed = 0) {
  // Multiply-xorshift on 64-bit words with the odd constants of splitmix64; both steps are bijections of the
  // state, so that two inputs of equal length which differ in one word never agree.
  constexpr uint64_t kFirst = 0xBF58476D1CE4E5B9, kSecond = 0x94D049BB133111EB;
  uint64_t state = seed ^ (bytes.size() * kSecond);
  while (!bytes.empty()) {
    uint64_t word = 0;
    const size_t size = bytes.size() < 8 ? bytes.size() : 8;
    std::memcpy(&word, bytes.data(), size);
    state = (state ^ word) * kFirst;
    state ^= state >> 32;
    bytes = bytes.subspan(size);
  }
  state = (state ^ (state >> 27)) * kSecond;
  return state ^ (state >> 31);
}

inline uint64_t hash_text(std::string_view text, uint64_t seed = 0) {
  return hash_bytes(std::as_bytes(std::span(text)), seed);
}

}  // namespace nibble
