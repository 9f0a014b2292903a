// The largest step of a model, in shapes alone: what a backend plans its working memory from.
#pragma once

#include <cstdint>
#include <vector>

namespace nibble {

struct StepShape {
  int64_t rows = 0;
  int64_t logit_rows = 0, vocab = 0;
  int64_t positions = 0;  // of a sequence, whole pages
  int64_t widest = 0;     // columns of the widest rows that go into a product
  int64_t pool = 0;       // tokens of the smallest pool that IndexSelectArgs chooses; 0: there are none

  // Of each layer that has it; equal ones may be left out.
  struct Attention {
    int64_t heads = 0, head_dim = 0, value_dim = 0;
    int64_t window = 0;  // as in AttendArgs
    int64_t chosen = 0;  // most positions of a Selection; 0: all are attended to
  };
  struct Experts {
    int64_t count = 0, chosen = 0, model = 0, width = 0;
  };
  std::vector<Attention> attention;
  std::vector<Experts> experts;
};

}  // namespace nibble
