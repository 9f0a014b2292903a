// The dimension key and the views that carry it.
//
//   T  tokens (rows) of a step      H  query heads        E  experts
//   M  sequences of a step          G  key/value heads    A  experts chosen for a token
//   D  model width                  K  head dim           I  expert (or feed-forward) width
//   V  vocabulary                   P  tokens of a page   S  residual streams
//
// A name ends in the dims of what it holds (x_TD, expert_ids_TA), a size or time in its unit (_bytes, _us).
#pragma once

#include <cstdint>

#include "base/check.h"

namespace nibble {

// A row-major matrix in the memory of a backend; does not own it. Rows may lie further apart than their
// width.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from one row to the next

  Rows() = default;
  Rows(T* data_, int64_t rows_, int64_t cols_) : Rows(data_, rows_, cols_, cols_) {}
  Rows(T* data_, int64_t rows_, int64_t cols_, int64_t stride_)
      : data(data_), rows(rows_), cols(cols_), stride(stride_) {}

  // A view that may write is a view that may read.
  operator Rows<const T>() const { return {data, rows, cols, stride}; }  // NOLINT: implicit by design

  T* row(int64_t i) const {
    NIBBLE_DCHECK(i >= 0 && i < rows);
    return data + i * stride;
  }
  Rows slice(int64_t first, int64_t count) const {
    NIBBLE_DCHECK(first >= 0 && first + count <= rows);
    return {data + first * stride, count, cols, stride};
  }
};

}  // namespace nibble
