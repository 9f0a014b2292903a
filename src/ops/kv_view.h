// How operations see the KV cache and the rows of a step.
#pragma once

#include <cstdint>

namespace nibble {

// A view of one layer's keys or values in pages: the token at position p of the sequence in row m of the page
// table lies in page table[m][(p / page_tokens) % table_pages], at [g][p % page_tokens][K]. A layer with a
// window has a short table, which makes it a ring. Values may be of another width than keys.
struct KvView {
  float* keys = nullptr;    // [pages, G, page_tokens, K]
  float* values = nullptr;  // the same, of value_width()
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t page_tokens = 0;
  int64_t table_pages = 0;         // columns of the page table
  const int32_t* table = nullptr;  // [sequence slots, table_pages]
  int64_t value_dim = 0;           // 0: head_dim

  int64_t value_width() const { return value_dim > 0 ? value_dim : head_dim; }
};

// Which token each row of the step is.
struct RowsOfStep {
  int64_t count = 0;
  const int32_t* positions_T = nullptr;  // position in its sequence
  const int32_t* slots_T = nullptr;      // its sequence's row in the page tables
  bool one_a_sequence = false;           // no two rows are of the same sequence, as where all decode
  bool one_sequence = false;             // all rows are of the same
};

}  // namespace nibble
