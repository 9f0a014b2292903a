// Default body of the routed experts: rows grouped by expert, three linears an expert (in NVFP4 where W4A4 is
// asked for), sums in the order of rank.
#include <algorithm>
#include <vector>

#include "ops/expert_groups.h"
#include "ops/ops.h"
#include "quant/nvfp4.h"

namespace nibble {
namespace {

// Rows on their way through a product: in NVFP4 without their second-level scales where W4A4 is asked for,
// and the scales, for the product's sums.
class ProductRows {
 public:
  explicit ProductRows(const ExpertArithmetic& arithmetic) : arithmetic_(arithmetic) {}

  void enter(Rows<float> x, float input_scale) {
    if (!arithmetic_.w4a4) return;
    scales_.resize(static_cast<size_t>(x.rows));
    for (int64_t r = 0; r < x.rows; ++r) {
      const float g = scale_of(x.row(r), x.cols, input_scale);
      nvfp4::round_row(x.row(r), x.cols, g, x.row(r));
      scales_[static_cast<size_t>(r)] = g;
    }
  }
  void leave(Rows<float> sums) const {
    if (!arithmetic_.w4a4) return;
    for (int64_t r = 0; r < sums.rows; ++r) {
      for (int64_t i = 0; i < sums.cols; ++i) sums.row(r)[i] *= scales_[static_cast<size_t>(r)];
    }
  }

 private:
  float scale_of(const float* x, int64_t k, float input_scale) const {
    if (arithmetic_.act_scale == ActScale::kUnit) return 1;
    if (arithmetic_.act_scale == ActScale::kStatic && input_scale > 0) return input_scale;
    return nvfp4::choose_row_scale(x, k);
  }

  const ExpertArithmetic& arithmetic_;
  std::vector<float> scales_;
};

}  // namespace

void Ops::do_expert_ffn(const ExpertFfnArgs& args) {
  const int64_t chosen = args.ids.cols, experts = args.experts.count();
  const ExpertGroups groups = group_by_expert(args.ids, experts);
  for (size_t r = 0; r < groups.token.size(); ++r) {
    std::copy_n(args.x.row(groups.token[r]), args.x.cols, args.scratch.gathered.row(static_cast<int64_t>(r)));
  }
  ProductRows rows(args.arithmetic);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t first = groups.begin[static_cast<size_t>(e)], count = groups.rows_of(e);
    if (count == 0) continue;
    const ExpertWeights& w = args.experts.experts()[static_cast<size_t>(e)];
    Rows<float> x = args.scratch.gathered.slice(first, count), gate = args.scratch.gate.slice(first, count);
    Rows<float> up = args.scratch.up.slice(first, count), down = args.scratch.down.slice(first, count);
    rows.enter(x, w.input_scale);
    linear(x, w.gate, gate);
    linear(x, w.up, up);
    rows.leave(gate);
    rows.leave(up);
    if (w.gate_bias != nullptr) add_bias(gate, w.gate_bias);
    if (w.up_bias != nullptr) add_bias(up, w.up_bias);
    activate(args.activation, gate, up, gate);
    rows.enter(gate, w.down_input_scale);
    linear(gate, w.down, down);
    rows.leave(down);
    if (w.down_bias != nullptr) add_bias(down, w.down_bias);
  }
  for (int64_t t = 0; t < args.out.rows; ++t) {
    float* out = args.out.row(t);
    std::fill_n(out, args.out.cols, 0.0f);
    for (int64_t a = 0; a < chosen; ++a) {
      const float* down = args.scratch.down.row(groups.row_of[static_cast<size_t>(t * chosen + a)]);
      const float weight = args.weights.row(t)[a];
      for (int64_t i = 0; i < args.out.cols; ++i) out[i] += weight * down[i];
    }
  }
  if (args.add_to.data != nullptr) add(args.out, args.add_to);
}

}  // namespace nibble
