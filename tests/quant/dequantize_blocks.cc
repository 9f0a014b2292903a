// dequantize_blocks TYPE: raw blocks of one row on stdin, float32 on stdout.
// dequantize_blocks --types: "ID NAME BLOCK_VALUES BLOCK_BYTES READABLE" a line.
// For tests/python/gguf_test.py.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "quant/gguf_blocks.h"

int main(int count, char** arguments) {
  const std::string name = count == 2 ? arguments[1] : "";
  if (name == "--types") {
    for (const nibble::GgufTypeInfo& info : nibble::gguf_types())
      std::cout << info.id << ' ' << info.name << ' ' << info.block_values << ' ' << info.block_bytes << ' '
                << info.readable << '\n';
    return 0;
  }
  const nibble::GgufTypeInfo* info = nibble::find_gguf_type(name);
  if (info == nullptr || !info->readable) {
    std::cerr << "usage: dequantize_blocks TYPE|--types\n";
    return 1;
  }
  const std::string bytes{std::istreambuf_iterator<char>(std::cin), {}};
  const auto blocks = static_cast<int64_t>(bytes.size()) / info->block_bytes;
  std::vector<float> values(static_cast<size_t>(blocks * info->block_values));
  nibble::dequantize_gguf_row(static_cast<nibble::GgufType>(info->id),
                              reinterpret_cast<const uint8_t*>(bytes.data()), blocks * info->block_values,
                              values.data());
  std::fwrite(values.data(), sizeof(float), values.size(), stdout);
  return 0;
}
