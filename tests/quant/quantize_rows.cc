// quantize_rows K SCALE: rows of K float32 values on stdin; of each row g, its e4m3 block scales, its codes,
// and what round_row makes of it on stdout. SCALE is "row" or the number g. For
// tests/python/activations_test.py.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "quant/nvfp4.h"

int main(int count, char** arguments) {
  const long k = count == 3 ? std::strtol(arguments[1], nullptr, 10) : 0;
  if (k <= 0 || k % nibble::nvfp4::kGroup != 0) {
    std::cerr << "usage: quantize_rows K row|G\n";
    return 1;
  }
  const std::string bytes{std::istreambuf_iterator<char>(std::cin), {}};
  std::vector<float> row(static_cast<size_t>(k)), rounded(row.size());
  std::vector<unsigned char> scales(row.size() / 16), codes(row.size() / 2);
  for (size_t at = 0; at + row.size() * 4 <= bytes.size(); at += row.size() * 4) {
    std::memcpy(row.data(), bytes.data() + at, row.size() * 4);
    const bool own = std::strcmp(arguments[2], "row") == 0;
    const float g = own ? nibble::nvfp4::choose_row_scale(row.data(), k) : std::strtof(arguments[2], nullptr);
    nibble::nvfp4::quantize_row(row.data(), k, g, codes.data(), scales.data());
    nibble::nvfp4::round_row(row.data(), k, g, rounded.data());
    std::fwrite(&g, sizeof(g), 1, stdout);
    std::fwrite(scales.data(), 1, scales.size(), stdout);
    std::fwrite(codes.data(), 1, codes.size(), stdout);
    std::fwrite(rounded.data(), sizeof(float), rounded.size(), stdout);
  }
  return 0;
}
