// The memory that the cuda backend plans for its operations, without a GPU.
#include "ops/cuda/working_memory.h"

#include <gtest/gtest.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/moe_decode.h"
#include "ops/cuda/tile_linear.h"

namespace nibble::testing {
namespace {

// A step of fewer rows takes no more.
void fewer_or_as_many(int64_t& before, int64_t now, int tokens) {
  EXPECT_LE(before, now) << tokens;
  before = now;
}

// Laguna-S-2.1, steps of 4096 rows: what its operations ask for, from what they are called with.
TEST(WorkingBytes, CoverEachOperation) {
  const StepShape step = {
      .rows = 4096,
      .logit_rows = 3,
      .vocab = 100352,
      .positions = 65536,
      .widest = 12288,
      .attention = {{.heads = 72, .head_dim = 128}, {.heads = 72, .head_dim = 128, .window = 512}},
      .experts = {{.count = 256, .chosen = 10, .model = 3072, .width = 1024}}};
  const int64_t all = cuda::working_bytes(step, {});
  const cuda::MoeShape moe = {.experts = 256, .chosen = 10, .model = 3072, .width = 1024};
  const int64_t handed = cuda::moe_decode_handed(moe, 4096) * 4;
  EXPECT_GT(handed, INT64_C(600) << 20);
  EXPECT_GE(all, handed + cuda::moe_decode_workspace_bytes(moe, 4096));
  EXPECT_GE(all, handed + cuda::tile_linear_workspace_bytes(cuda::TileKind::kBF16, 4096, 12288));
  EXPECT_GE(all, handed + cuda::top_logits_scratch(3, 100352) * 8);
  const int64_t a_row = 72 * (65536 / 256) * (2 + 128);
  EXPECT_GE(all, handed + cuda::attend_rows_at_once(4096, a_row) * a_row * 4);
  EXPECT_LE(all, handed + (INT64_C(256) << 20));  // the pieces of attention are the most
  // A step of fewer rows takes no more, whatever they are.
  for (int64_t rows : {1, 2, 8, 9, 16, 17, 33, 128, 129, 1000}) {
    StepShape fewer = step;
    fewer.rows = rows;
    EXPECT_LE(cuda::working_bytes(fewer, {}), all) << rows;
  }
  // Where there are kernels for many rows an expert, they need more memory and hand on less.
  const cuda::MoeShape many = cuda::with_many(moe);
  EXPECT_EQ(many.most_few, 204);
  EXPECT_GE(cuda::working_bytes(step, {.has_wgmma = true}),
            cuda::moe_decode_workspace_bytes(many, 4096) + cuda::moe_decode_handed(many, 4096) * 4);
  EXPECT_LT(cuda::moe_decode_handed(many, 4096) * 4, INT64_C(40) << 20);
  int64_t before = 0, words_before = 0;
  for (int tokens : {1, 8, 9, 64, 65, 203, 204, 205, 256, 1000, 4096}) {
    fewer_or_as_many(before, cuda::moe_decode_workspace_bytes(many, tokens), tokens);
    fewer_or_as_many(words_before, cuda::moe_decode_handed(many, tokens), tokens);
    EXPECT_LE(cuda::moe_decode_handed(moe, std::min(tokens, 204)), cuda::moe_decode_handed(many, tokens));
  }
  // As measured, in either format, or forced.
  cuda::MoePaths paths = {.has_wgmma = true};
  for (const auto& [path, most_few] : {std::pair{"auto", 2048}, {"many", 0}}) {
    cuda::MoeShape mxfp4 = moe;
    mxfp4.kind = cuda::TileKind::kMxfp4, mxfp4.most_few = most_few;
    paths.path = path, paths.crossovers = {{cuda::crossover_key("", mxfp4), 2048}};
    EXPECT_GE(cuda::working_bytes(step, paths),
              cuda::moe_decode_workspace_bytes(mxfp4, 4096) + cuda::moe_decode_handed(mxfp4, 4096) * 4);
  }
  EXPECT_EQ(cuda::working_bytes(step, {.path = "few", .has_wgmma = true}), all);
  EXPECT_LT(cuda::working_bytes(step, {.path = "portable"}), handed);
  // A row that needs more than attention takes at once is done alone.
  StepShape longer = step;
  longer.positions = INT64_C(1) << 24;
  EXPECT_GE(cuda::working_bytes(longer, {}), handed + INT64_C(72) * (1 << 16) * 130 * 4);
  // Of chosen positions only those count, and the scores of pools.
  StepShape chosen = step;
  chosen.positions = INT64_C(1) << 20;
  chosen.experts.clear();
  chosen.attention = {{.heads = 64, .head_dim = 576, .value_dim = 512, .chosen = 2051}};
  const int64_t without_pools = cuda::working_bytes(chosen, {});
  chosen.pool = 4;
  EXPECT_GE(cuda::working_bytes(chosen, {}), 4096 * (INT64_C(1) << 18) * 4);
  EXPECT_LT(without_pools, INT64_C(300) << 20);
}

}  // namespace
}  // namespace nibble::testing
