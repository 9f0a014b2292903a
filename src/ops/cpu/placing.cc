#include "ops/cpu/placing.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/numbers.h"
#include "ops/cpu/bf16_in_12.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/weight_tiles.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kRowsPerTask = 8 * kTileWeightRows, kAlign = 64;

enum class Order { kTiles, kIn12, kAsItIs };

struct Placing {
  Matrix* to;
  Matrix from;
  Order order;
  int64_t marked = 0;  // runs of kIn12
  int64_t at = 0;      // in the memory of all
};

// Some rows of it.
struct Part {
  Placing* placing;
  int64_t first, last;
  int64_t marked = 0;  // runs of kIn12 before these rows
};

Order order_of(const Matrix& m) {
  if (m.format == MatrixFormat::kBF16) return Order::kIn12;  // until its runs are counted
  return can_be_tiles(m) ? Order::kTiles : Order::kAsItIs;
}

int64_t placed_bytes(const Placing& p) {
  const Matrix& m = p.from;
  switch (p.order) {
    case Order::kTiles:
      return tile_bytes(*tile_format(m.format), m.n, m.k);
    case Order::kIn12:
      return bytes_in_12(m.n, m.k, p.marked);
    case Order::kAsItIs:
      return matrix_bytes(m.format, m.n, m.k);
  }
  NIBBLE_CHECK(false);
}

// What of a matrix lies at `to`.
void point_to(const Placing& p, uint8_t* to) {
  Matrix& m = *p.to;
  m.codes = to;
  m.scales = nullptr;
  switch (p.order) {
    case Order::kTiles:
      m.format = *tile_format(p.from.format);
      m.tiled = true;
      return;
    case Order::kIn12:
      m.scales = to + bases_offset(m.n, m.k);
      m.tiled = m.in_12_bits = true;
      return;
    case Order::kAsItIs:
      if (p.from.scales != nullptr) m.scales = to + matrix_code_bytes(m.format, m.n, m.k);
  }
}

void copy_rows(const void* from, int64_t row_bytes, int64_t first, int64_t last, uint8_t* to) {
  if (row_bytes == 0) return;
  std::memcpy(to + first * row_bytes, static_cast<const uint8_t*>(from) + first * row_bytes,
              static_cast<size_t>((last - first) * row_bytes));
}

void put(const Part& part, uint8_t* to) {
  const Placing& p = *part.placing;
  const Matrix& m = p.from;
  switch (p.order) {
    case Order::kTiles:
      return make_tiles(m, part.first / kTileWeightRows, ceil_div(part.last, kTileWeightRows), to);
    case Order::kIn12:
      return put_in_12(m, part.first, part.last, part.marked, to);
    case Order::kAsItIs:
      const MatrixFormatInfo& info = matrix_format_info(m.format);
      copy_rows(m.codes, info.code_row_bytes(m.k), part.first, part.last, to);
      copy_rows(m.scales, info.scale_row_bytes(m.k), part.first, part.last,
                to + matrix_code_bytes(m.format, m.n, m.k));
  }
}

// Finds of each part the marked runs before it, and which BF16 matrices stay as they are.
void count_marked(ThreadPool& pool, std::vector<Placing>& all, std::vector<Part>& parts) {
  pool.parallel_for(std::ssize(parts), [&](int64_t i) {
    Part& part = parts[static_cast<size_t>(i)];
    if (part.placing->order == Order::kIn12)
      part.marked = count_marked_runs(part.placing->from, part.first, part.last);
  });
  for (Part& part : parts) {
    const int64_t own = part.marked;
    part.marked = part.placing->marked;
    part.placing->marked += own;
  }
  for (Placing& p : all) {
    if (p.order == Order::kIn12 && !pays_in_12(p.from.n, p.from.k, p.marked)) p.order = Order::kAsItIs;
  }
}

}  // namespace

Result<Buffer> place_weights(ThreadPool& pool, const std::vector<Matrix*>& matrices) {
  std::vector<Placing> all;
  all.reserve(matrices.size());
  std::vector<Part> parts;
  for (Matrix* m : matrices) {
    all.push_back({.to = m, .from = *m, .order = order_of(*m)});
    for (int64_t first = 0; first < m->n; first += kRowsPerTask)
      parts.push_back({&all.back(), first, std::min(m->n, first + kRowsPerTask)});
  }
  count_marked(pool, all, parts);
  int64_t total = 0;
  for (Placing& p : all) {
    p.at = total;
    total += round_up(placed_bytes(p), kAlign);
  }
  NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(host_memory(), total, "weights"));
  use_huge_pages(buffer);
  spread_over_nodes(buffer, nodes_to_spread_over());
  auto* const bytes = buffer.as<uint8_t>();
  pool.parallel_for(std::ssize(parts), [&](int64_t i) {
    const Part& part = parts[static_cast<size_t>(i)];
    put(part, bytes + part.placing->at);
  });
  for (const Placing& p : all) point_to(p, bytes + p.at);
  return buffer;
}

}  // namespace nibble::cpu
