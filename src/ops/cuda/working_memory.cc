#include "ops/cuda/working_memory.h"

#include "ops/cuda/kernels.h"
#include "ops/cuda/moe_decode.h"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {
namespace {

// Nobody reads or writes it.
template <class T>
Rows<T> shape(int64_t rows, int64_t cols) {
  return {nullptr, rows, cols};
}

}  // namespace

int64_t working_bytes(const StepShape& step, const MoePaths& paths) {
  if (step.rows == 0) return 0;
  // One operation's working memory is another's behind it, and so with the words that are handed on.
  int64_t scratch = 0, handed = 0;
  auto scratch_of = [&](int64_t elements, size_t each) {
    scratch = std::max(scratch, elements * static_cast<int64_t>(each));
  };
  const KvView all_positions = {.page_tokens = 1, .table_pages = step.positions};
  for (const StepShape::Attention& a : step.attention) {
    AttendArgs args = {
        .q = shape<const float>(step.rows, a.heads * a.head_dim), .kv = all_positions, .window = a.window};
    args.kv.head_dim = a.head_dim;
    args.kv.value_dim = a.value_dim;
    const Selection selection = {.positions = shape<int32_t>(step.rows, a.chosen)};
    const int64_t a_row = attend_row_scratch(args, a.chosen > 0 ? &selection : nullptr);
    const int64_t rows = attend_rows_at_once(step.rows, a_row);
    scratch_of(rows * a_row, sizeof(float));
    handed = std::max(handed, rows * a.heads);
  }
  if (step.pool > 0) {
    scratch_of(index_select_scratch({.kv = all_positions, .pool = step.pool, .rows = {.count = step.rows}}),
               sizeof(uint32_t));
  }
  for (const MatrixFormatInfo& info : matrix_formats()) {
    if (has_tiles(info.format))
      scratch_of(tile_linear_workspace_bytes(tile_kind({.format = info.format}), step.rows, step.widest), 1);
  }
  for (const StepShape::Experts& e : step.experts) {
    MoeShape moe = {.experts = static_cast<int>(e.count),
                    .model = static_cast<int>(e.model),
                    .width = static_cast<int>(e.width)};
    scratch_of(kWordsOfRoutedRow * step.rows * e.chosen, sizeof(int32_t));
    if (paths.path == "portable") continue;
    for (TileKind kind : {TileKind::kNvfp4, TileKind::kMxfp4, TileKind::kQ4, TileKind::kBF16}) {
      // Whichever it is; in BF16 there are only kernels for many.
      if (kind == TileKind::kBF16 && (!paths.has_wgmma || paths.path == "few")) continue;
      moe.kind = kind;
      const MoeShape shape = paths.choose(moe, e.chosen);
      const int tokens = static_cast<int>(step.rows);
      scratch_of(moe_decode_workspace_bytes(shape, tokens), 1);
      handed = std::max(handed, moe_decode_handed(shape, tokens));
    }
  }
  scratch_of(top_logits_scratch(step.logit_rows, step.vocab), sizeof(uint64_t));
  return scratch + handed * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace nibble::cuda
