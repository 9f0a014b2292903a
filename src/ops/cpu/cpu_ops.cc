#include "ops/cpu/cpu_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "ops/cpu/attention.h"
#include "ops/cpu/choices.h"
#include "ops/cpu/expert_ffn.h"
#include "ops/cpu/isa.h"
#include "ops/cpu/mixers.h"
#include "ops/cpu/placing.h"
#include "ops/cpu/scratch.h"
#include "ops/cpu/tasks.h"
#include "ops/cpu/weight_tiles.h"
#include "ops/host_read_bandwidth.h"
#include "ops/rope_table.h"
#include "ops/routing.h"

namespace nibble {
namespace {

using cpu::for_each;

class CpuOps final : public Ops {
 public:
  CpuOps(int threads, const cpu::Kernels& kernels, bool kernels_were_asked, cpu::Rounding rounding)
      : pool_(threads), kernels_(kernels), kernels_were_asked_(kernels_were_asked), rounding_(rounding) {}

  std::string_view name() const override { return "cpu"; }
  Memory& memory() override { return host_memory(); }
  std::string description() const override {
    return fmt::format("cpu ({}), {} threads{}", kernels_.isa, pool_.threads(),
                       rounding_.int8 ? ", int8 activations" : "");
  }
  std::vector<std::string> choices() const override {
    return cpu::choices(kernels_, kernels_were_asked_, rounding_, !uses_host_weights_);
  }
  bool rounds_activations() const override { return rounding_.int8; }
  Result<double> read_bandwidth() override { return host_read_bandwidth(pool_); }
  bool copies_weights(MatrixFormat format) const override {
    const bool in_order = format == MatrixFormat::kBF16 ? kernels_.has_in_12 && !uses_host_bf16_
                                                        : cpu::tile_format(format).has_value();
    return in_order && !uses_host_weights_;
  }
  bool use_host_weights() override { return uses_host_weights_ = true; }
  bool use_host_bf16() override { return uses_host_bf16_ = true; }
  Result<Matrix> place(const Matrix& host_matrix, MatrixUse use) override {
    Matrix placed = host_matrix;
    if (use != MatrixUse::kEmbedding) NIBBLE_RETURN_IF_ERROR(place_all({&placed}));
    return placed;
  }

 protected:
  void do_embed(std::span<const int32_t> ids_T, const Matrix& table_VD, Rows<float> out_TD) override {
    for_each(pool_, out_TD.rows, out_TD.cols,
             [&](int64_t t) { dequantize_row(table_VD, ids_T[static_cast<size_t>(t)], out_TD.row(t)); });
  }

  void do_gather(Rows<const float> x, std::span<const int32_t> indices, Rows<float> out) override {
    for (int64_t t = 0; t < out.rows; ++t)
      std::copy_n(x.row(indices[static_cast<size_t>(t)]), x.cols, out.row(t));
  }

  void do_rms_norm(Rows<const float> x, const float* weight, float eps, Rows<float> out) override {
    for_each(pool_, x.rows, x.cols / 8,
             [&](int64_t t) { kernels_.rms_norm(x.row(t), weight, eps, x.cols, out.row(t)); });
  }

  void do_linear(Rows<const float> x, const Matrix& w, Rows<float> out) override {
    const Product product[] = {{w, nullptr, out}};
    do_linears(x, product);
  }

  void do_exact_linear(Rows<const float> x, const Matrix& w, Rows<float> out) override {
    without_rounding([&] { do_linear(x, w, out); });
  }

  // Rows are packed once for all matrices that want them so, and all are one loop.
  void do_linears(Rows<const float> x, std::span<const Product> products) override {
    if (x.rows == 0) return;
    cpu::PackedRows packed[std::size(cpu::kPackedGroupFloats)] = {};
    int64_t total_rows = 0;
    for (const Product& p : products) {
      const cpu::Packing packing = cpu::kernel_weights(p.weight, rounding_).packing;
      const auto i = static_cast<size_t>(packing);
      if (packed[i].x == nullptr) packed[i] = cpu::pack_rows(pool_, kernels_, packing, x, packed_[i]);
      total_rows += p.weight.n;
    }
    linear_tasks_.clear();
    for (const Product& p : products) {
      const int64_t n = p.weight.n;
      const int64_t each =
          cpu::weight_rows_per_task(n, total_rows, matrix_bytes(p.weight.format, 1, p.weight.k), x.rows,
                                    pool_.threads(), 2 * cpu::kTileWeightRows);
      for (int64_t first = 0; first < n; first += each)
        linear_tasks_.push_back({&p, first, std::min(n, first + each)});
    }
    pool_.parallel_for(std::ssize(linear_tasks_), [&](int64_t i) {
      const auto& [p, first, last] = linear_tasks_[static_cast<size_t>(i)];
      const cpu::Weights weights = cpu::kernel_weights(p->weight, rounding_);
      kernels_.linear(
          {weights, packed[static_cast<size_t>(weights.packing)], first, last, p->out.data, p->out.stride});
      for (int64_t t = 0; t < x.rows; ++t) {
        float* out = p->out.row(t) + first;
        if (p->bias != nullptr) kernels_.add(p->bias + first, last - first, out);
        if (p->add_to.data != nullptr) kernels_.add(out, last - first, p->add_to.row(t) + first);
      }
    });
  }

  void do_rope_table(const int32_t* positions_T, std::span<const float> inv_freq, float factor,
                     Rows<float> out) override {
    for_each(pool_, out.rows, out.cols * 10,
             [&](int64_t t) { rope_table_row_on_host(positions_T[t], inv_freq, factor, out.row(t)); });
  }

  void do_rope(Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style,
               int64_t offset) override {
    const int64_t half = table.cols / 2;
    auto rotate = style == RopeStyle::kHalves ? kernels_.rope : kernels_.rope_interleaved;
    for_each(pool_, x.rows, x.cols / 4, [&](int64_t t) {
      for (int64_t at = offset; at < x.cols; at += head_dim) {
        rotate(x.row(t) + at, table.row(t), table.row(t) + half, half);
      }
    });
  }

  void do_write_kv(Rows<const float> k, Rows<const float> v, const RowsOfStep& rows,
                   const KvView& kv) override {
    const int64_t width = kv.value_width();
    for_each(pool_, k.rows, k.cols / 4, [&](int64_t t) {
      const int64_t position = rows.positions_T[t];
      const int64_t page =
          kv.table[rows.slots_T[t] * kv.table_pages + position / kv.page_tokens % kv.table_pages];
      for (int64_t g = 0; g < kv.kv_heads; ++g) {
        const int64_t at = (page * kv.kv_heads + g) * kv.page_tokens + position % kv.page_tokens;
        std::copy_n(k.row(t) + g * kv.head_dim, kv.head_dim, kv.keys + at * kv.head_dim);
        std::copy_n(v.row(t) + g * width, width, kv.values + at * width);
      }
    });
  }

  void do_attend(const AttendArgs& args) override {
    cpu::attend_rows(pool_, kernels_, args, nullptr, attend_scratch_);
    if (args.gate_kind != OutputGate::kNone) {
      do_gate_output(args.gate_kind, args.gate, args.kv.value_width(), args.out);
    }
  }

  void do_attend_selected(const AttendArgs& args, const Selection& selection) override {
    cpu::attend_rows(pool_, kernels_, args, &selection, attend_scratch_);
  }

  void do_index_select(const IndexSelectArgs& args) override {
    cpu::index_select_rows(pool_, kernels_, args, select_scratch_);
  }

  void do_causal_conv(const CausalConvArgs& args) override { cpu::causal_conv_rows(pool_, kernels_, args); }

  void do_kda(const KdaArgs& args) override { cpu::kda_rows(pool_, kernels_, args); }

  void do_copy(Rows<const float> x, Rows<float> out) override {
    for_each(pool_, x.rows, x.cols / 8, [&](int64_t t) { std::copy_n(x.row(t), x.cols, out.row(t)); });
  }

  void do_layer_norm(Rows<const float> x, const float* weight, const float* bias, float eps,
                     Rows<float> out) override {
    for_each(pool_, x.rows, x.cols / 4,
             [&](int64_t t) { kernels_.layer_norm(x.row(t), weight, bias, eps, x.cols, out.row(t)); });
  }

  void do_hyper_weights(const HyperSpec& spec, const float* base, const float* scale,
                        Rows<float> mix) override {
    // A few numbers a row: the default's loops.
    for_each(pool_, mix.rows, 1000,
             [&](int64_t t) { Ops::do_hyper_weights(spec, base, scale, mix.slice(t, 1)); });
  }

  void do_hyper_collect(const HyperSpec& spec, Rows<const float> streams, Rows<const float> mix,
                        Rows<float> out) override {
    for_each(pool_, out.rows, streams.cols / 8, [&](int64_t t) {
      kernels_.hyper_collect(streams.row(t), mix.row(t), spec.streams, out.cols, out.row(t));
    });
  }

  void do_hyper_distribute(const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                           Rows<float> streams) override {
    NIBBLE_CHECK(spec.streams <= kMaxStreams);
    for_each(pool_, y.rows, streams.cols / 4, [&](int64_t t) {
      const float* post = mix.row(t) + spec.streams;
      kernels_.hyper_distribute(y.row(t), post, post + spec.streams, spec.streams, y.cols, streams.row(t));
    });
  }

  void do_hyper_mean(const HyperSpec& spec, Rows<const float> streams, Rows<float> out) override {
    const std::vector<float> share(static_cast<size_t>(spec.streams),
                                   1.0f / static_cast<float>(spec.streams));
    for_each(pool_, out.rows, streams.cols / 8, [&](int64_t t) {
      kernels_.hyper_collect(streams.row(t), share.data(), spec.streams, out.cols, out.row(t));
    });
  }

  void do_gate_output(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<float> x) override {
    for_each(pool_, x.rows, gate.cols + x.cols / 8, [&](int64_t t) {
      constexpr int64_t kAtOnce = 256;
      float factors[kAtOnce];
      for (int64_t i = 0; i < gate.cols; i += kAtOnce) {
        const int64_t n = std::min(kAtOnce, gate.cols - i);
        if (kind == OutputGate::kSigmoidElement) {
          kernels_.sigmoid(gate.row(t) + i, n, factors);
        } else {
          kernels_.softplus(gate.row(t) + i, n, factors);
        }
        if (kind != OutputGate::kSoftplusHead) {
          kernels_.multiply(factors, n, x.row(t) + i);
          continue;
        }
        for (int64_t h = 0; h < n; ++h) {
          kernels_.multiply_by(factors[h], head_dim, x.row(t) + (i + h) * head_dim);
        }
      }
    });
  }

  void do_activate(const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up,
                   Rows<float> out) override {
    for_each(pool_, gate.rows, gate.cols,
             [&](int64_t t) { kernels_.activate(spec, gate.row(t), up.row(t), gate.cols, out.row(t)); });
  }

  void do_add(Rows<const float> y, Rows<float> x) override {
    for_each(pool_, x.rows, x.cols / 8, [&](int64_t t) { kernels_.add(y.row(t), x.cols, x.row(t)); });
  }

  void do_add_bias(Rows<float> x, const float* bias) override {
    for_each(pool_, x.rows, x.cols / 8, [&](int64_t t) { kernels_.add(bias, x.cols, x.row(t)); });
  }

  void do_route(const RouteArgs& args) override {
    const int64_t each = cpu::items_per_task(args.ids.rows, args.logits.cols * 20, pool_.threads());
    if (args.ids.rows == 0) return;
    pool_.parallel_for(ceil_div(args.ids.rows, each), [&](int64_t task) {
      const int64_t first = task * each, count = std::min(each, args.ids.rows - first);
      route_on_host({args.logits.slice(first, count), args.bias_E, args.spec, args.ids.slice(first, count),
                     args.weights.slice(first, count)});
    });
  }

  Result<std::unique_ptr<PlacedExperts>> do_place_experts(std::span<const ExpertWeights> host_experts,
                                                          ExpertsOf /*whose*/) override {
    std::vector<ExpertWeights> experts(host_experts.begin(), host_experts.end());
    std::vector<Matrix*> matrices;
    for (ExpertWeights& e : experts) matrices.insert(matrices.end(), {&e.gate, &e.up, &e.down});
    NIBBLE_RETURN_IF_ERROR(place_all(matrices));
    return std::make_unique<PlacedExperts>(std::move(experts));
  }

  void do_expert_ffn(const ExpertFfnArgs& args) override {
    // Rows of W4A4 are rounded already, and to what fixed point holds exactly.
    if (args.arithmetic.w4a4) return without_rounding([&] { Ops::do_expert_ffn(args); });
    if (!cpu::can_fuse(args, rounding_)) return Ops::do_expert_ffn(args);
    cpu::fused_expert_ffn(pool_, kernels_, args, rounding_, expert_scratch_);
    if (args.add_to.data != nullptr) do_add(args.out, args.add_to);
  }

 private:
  template <class Work>
  void without_rounding(const Work& work) {
    const cpu::Rounding rounding = std::exchange(rounding_, {});
    work();
    rounding_ = rounding;
  }

  // Where copies_weights(): into memory of their own.
  Status place_all(const std::vector<Matrix*>& matrices) {
    std::vector<Matrix*> copied;
    std::ranges::copy_if(matrices, std::back_inserter(copied),
                         [&](const Matrix* m) { return copies_weights(m->format); });
    if (copied.empty()) return {};
    NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, cpu::place_weights(pool_, copied));
    weights_.push_back(std::move(buffer));
    return {};
  }

  // Some weight rows of a product.
  struct LinearPart {
    const Product* product;
    int64_t first, last;
  };

  ThreadPool pool_;
  const cpu::Kernels& kernels_;
  const bool kernels_were_asked_;
  cpu::Rounding rounding_;
  bool uses_host_weights_ = false, uses_host_bf16_ = false;
  std::vector<Buffer> weights_;  // what place_all() copied
  // Grow to the largest step and stay.
  cpu::Scratch attend_scratch_, select_scratch_;
  cpu::Scratch packed_[std::size(cpu::kPackedGroupFloats)];
  std::vector<LinearPart> linear_tasks_;
  cpu::ExpertFfnScratch expert_scratch_;
};

}  // namespace

Result<std::unique_ptr<Ops>> make_cpu_ops(int threads, const std::string& isa, bool int8_activations) {
  NIBBLE_ASSIGN_OR_RETURN(const cpu::Kernels* kernels, cpu::find_kernels(isa));
  const cpu::Rounding rounding{.int8 = int8_activations, .pairs = int8_activations && kernels->has_pairs};
  return std::unique_ptr<Ops>(std::make_unique<CpuOps>(threads, *kernels, !isa.empty(), rounding));
}

}  // namespace nibble
