// What the cpu backend's operations share on the host side of the kernel table: working memory, packed rows,
// loops in tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "base/thread_pool.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/tasks.h"
#include "ops/dims.h"
#include "quant/matrix.h"

namespace nibble::cpu {

// Floats at a 64-byte boundary that grow and never shrink; the content is lost when they grow.
class Scratch {
 public:
  float* reserve(int64_t count) {
    if (count > capacity_) {
      floats_.reset();
      floats_.reset(static_cast<float*>(::operator new(static_cast<size_t>(count) * sizeof(float), kAlign)));
      capacity_ = count;
    }
    return floats_.get();
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Delete {
    void operator()(float* floats) const { ::operator delete(floats, kAlign); }
  };
  std::unique_ptr<float, Delete> floats_;
  int64_t capacity_ = 0;
};

// body(i) for each i in [0, count), each worth about item_ns.
template <class Body>
void for_each(ThreadPool& pool, int64_t count, int64_t item_ns, const Body& body) {
  if (count == 0) return;
  const int64_t each = items_per_task(count, item_ns, pool.threads());
  pool.parallel_for(ceil_div(count, each), [&](int64_t task) {
    for (int64_t i = task * each; i < std::min(count, (task + 1) * each); ++i) body(i);
  });
}

// Floats of a packed row of k columns.
inline int64_t packed_floats(Packing packing, int64_t k) {
  return ceil_div(k, kPackedColumns) * kPackedGroupFloats[static_cast<int>(packing)];
}

// Which activations a product rounds: BackendOptions::cpu_activations.
struct Rounding {
  bool int8 = false;   // to 8 bits, into weights in tiles
  bool pairs = false;  // to bfloat16, into BF16 weights; of kernels that have pairs
};

// The kernels' view of a matrix.
Weights kernel_weights(const Matrix& matrix, Rounding rounding);

// All rows of x, packed into `scratch`.
PackedRows pack_rows(ThreadPool& pool, const Kernels& kernels, Packing packing, Rows<const float> x,
                     Scratch& scratch);

}  // namespace nibble::cpu
