#include "ops/rope_table.h"

#include <cmath>

namespace nibble {

void rope_table_row_on_host(int32_t position, std::span<const float> inv_freq, float factor, float* out) {
  float* sines = out + inv_freq.size();
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    float angle = static_cast<float>(position) * inv_freq[i];
    out[i] = std::cos(angle) * factor;
    sines[i] = std::sin(angle) * factor;
  }
}

}  // namespace nibble
