#include "quant/float_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace nibble {

uint16_t float_to_f16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x1p-14f) {
    // Subnormal: a multiple of 2^-24; nearbyint rounds to nearest even.
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)));
  }
  uint32_t rounded = (bits & 0x7FFFFFFFu) + 0xFFFu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

uint8_t float_to_e4m3(float value) {
  uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7F);
  float a = std::fabs(value);
  if (a >= 464.0f) return static_cast<uint8_t>(sign | 0x7E);  // beyond the last tie: saturate
  if (a < 0x1p-6f) {
    // Subnormal: a multiple of 2^-9; 8 of them is the first normal code, which follows by itself.
    return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(a * 0x1p9f)));
  }
  uint32_t bits = std::bit_cast<uint32_t>(a);
  bits += 0x7FFFFu + ((bits >> 20) & 1u);
  uint32_t code = (bits >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (code > 0x7E ? 0x7E : code));
}

std::optional<size_t> find_e4m3_nan(std::span<const uint8_t> codes) {
  // Adding 1 to each byte's low seven bits carries into its top bit for 0x7F alone, and never out of the
  // byte. A block has no early exit, so that the compiler makes vectors of the loop.
  constexpr uint64_t kLowBits = 0x7F7F7F7F7F7F7F7F, kOnes = 0x0101010101010101, kTopBits = ~kLowBits;
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < codes.size(); begin += kBlock) {
    const std::span<const uint8_t> block = codes.subspan(begin, std::min(kBlock, codes.size() - begin));
    uint64_t carries = 0;
    size_t i = 0;
    for (; i + 8 <= block.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, block.data() + i, 8);
      carries |= (word & kLowBits) + kOnes;
    }
    bool found = (carries & kTopBits) != 0;
    for (; i < block.size(); ++i) found = found || e4m3_is_nan(block[i]);
    if (!found) continue;
    return begin + static_cast<size_t>(std::find_if(block.begin(), block.end(), e4m3_is_nan) - block.begin());
  }
  return std::nullopt;
}

}  // namespace nibble
