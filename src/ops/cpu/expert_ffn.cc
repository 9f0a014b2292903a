#include "ops/cpu/expert_ffn.h"

#include <algorithm>
#include <cstring>

#include "ops/expert_groups.h"

namespace nibble::cpu {
namespace {

// Some weight rows of one expert and all its grouped rows.
struct ExpertTask {
  int64_t expert, first, last;  // weight rows
  int64_t begin, rows;          // grouped rows
};

// Cuts the n weight rows of every expert that has rows, into multiples of `unit`; `row_bytes` of weights are
// read for one.
std::vector<ExpertTask> cut(const ExpertGroups& groups, int64_t n, int64_t row_bytes, int threads,
                            int64_t unit) {
  const int64_t experts = static_cast<int64_t>(groups.begin.size()) - 1;
  int64_t used = 0;
  for (int64_t e = 0; e < experts; ++e) used += groups.rows_of(e) > 0 ? 1 : 0;
  std::vector<ExpertTask> tasks;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = groups.begin[static_cast<size_t>(e)];
    const int64_t rows = groups.rows_of(e);
    if (rows == 0) continue;
    const int64_t each = weight_rows_per_task(n, used * n, row_bytes, rows, threads, unit);
    for (int64_t first = 0; first < n; first += each) {
      tasks.push_back({e, first, std::min(n, first + each), begin, rows});
    }
  }
  return tasks;
}

}  // namespace

bool can_fuse(const ExpertFfnArgs& args, Rounding rounding) {
  auto packing = [&](const Matrix& m) { return kernel_weights(m, rounding).packing; };
  const Packing up = packing(args.experts.experts()[0].up), down = packing(args.experts.experts()[0].down);
  return std::ranges::all_of(args.experts.experts(), [&](const ExpertWeights& w) {
    return packing(w.gate) == up && packing(w.up) == up && packing(w.down) == down;
  });
}

void fused_expert_ffn(ThreadPool& pool, const Kernels& kernels, const ExpertFfnArgs& args, Rounding rounding,
                      ExpertFfnScratch& scratch) {
  const std::span<const ExpertWeights> experts = args.experts.experts();
  const int64_t chosen = args.ids.cols;
  const int64_t width = args.scratch.gate.cols, model = args.x.cols, routed = args.ids.rows * chosen;
  if (routed == 0) return;
  const ExpertGroups groups = group_by_expert(args.ids, args.experts.count());
  const Matrix& gate = experts[0].gate;
  const Matrix& down = experts[0].down;
  const Packing down_packing = kernel_weights(down, rounding).packing;
  auto expert = [&](int64_t e) -> const ExpertWeights& { return experts[static_cast<size_t>(e)]; };

  const PackedRows x =
      pack_rows(pool, kernels, kernel_weights(gate, rounding).packing, args.x, scratch.packed);

  const int64_t stride = packed_floats(down_packing, width);
  float* activated = scratch.activated.reserve(routed * stride);
  const std::vector<ExpertTask> up_tasks =
      cut(groups, width, 2 * matrix_bytes(gate.format, 1, gate.k), pool.threads(), kPackedColumns);
  pool.parallel_for(static_cast<int64_t>(up_tasks.size()), [&](int64_t i) {
    const ExpertTask& task = up_tasks[static_cast<size_t>(i)];
    const ExpertWeights& w = expert(task.expert);
    kernels.gate_up({kernel_weights(w.gate, rounding),
                     kernel_weights(w.up, rounding),
                     w.gate_bias,
                     w.up_bias,
                     args.activation,
                     {x.x, groups.token.data() + task.begin, task.rows, x.stride},
                     task.first,
                     task.last,
                     down_packing,
                     activated + task.begin * stride,
                     stride});
  });

  Rows<float> down_rows = args.scratch.down;
  const std::vector<ExpertTask> down_tasks =
      cut(groups, model, matrix_bytes(down.format, 1, down.k), pool.threads(), 2 * kTileWeightRows);
  pool.parallel_for(static_cast<int64_t>(down_tasks.size()), [&](int64_t i) {
    const ExpertTask& task = down_tasks[static_cast<size_t>(i)];
    const ExpertWeights& w = expert(task.expert);
    kernels.linear({kernel_weights(w.down, rounding),
                    {activated + task.begin * stride, nullptr, task.rows, stride},
                    task.first,
                    task.last,
                    down_rows.row(task.begin),
                    down_rows.stride});
    if (w.down_bias == nullptr) return;
    for (int64_t r = task.begin; r < task.begin + task.rows; ++r)
      kernels.add(w.down_bias + task.first, task.last - task.first, down_rows.row(r) + task.first);
  });

  for_each(pool, args.out.rows, chosen * model / 8, [&](int64_t t) {
    std::fill_n(args.out.row(t), model, 0.0f);
    for (int64_t a = 0; a < chosen; ++a) {
      const int64_t row = groups.row_of[static_cast<size_t>(t * chosen + a)];
      kernels.add_scaled(down_rows.row(row), args.weights.row(t)[a], model, args.out.row(t));
    }
  });
}

}  // namespace nibble::cpu
