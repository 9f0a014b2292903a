#include "ops/reference/reference_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/thread_pool.h"
#include "ops/host_read_bandwidth.h"
#include "ops/rope_table.h"
#include "ops/routing.h"
#include "quant/float_codes.h"

namespace nibble {
namespace {

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

float activated(const ActivationSpec& spec, float gate, float up) {
  if (spec.kind != ActivationSpec::kSilu) {
    gate = std::min(gate, spec.limit);
    up = std::clamp(up, -spec.limit, spec.limit);
  }
  if (spec.kind == ActivationSpec::kGptOss) return gate / (1.0f + std::exp(-spec.alpha * gate)) * (up + 1.0f);
  return gate / (1.0f + std::exp(-gate)) * up;
}

class ReferenceOps final : public Ops {
 public:
  explicit ReferenceOps(int threads) : pool_(threads) {}

  std::string_view name() const override { return "reference"; }
  Memory& memory() override { return host_memory(); }
  std::string description() const override {
    return fmt::format("reference (scalar), {} threads", pool_.threads());
  }
  Result<double> read_bandwidth() override { return host_read_bandwidth(pool_); }
  Result<Matrix> place(const Matrix& host_matrix, MatrixUse) override { return host_matrix; }

 protected:
  void do_embed(std::span<const int32_t> ids_T, const Matrix& table_VD, Rows<float> out_TD) override {
    for (int64_t t = 0; t < out_TD.rows; ++t)
      dequantize_row(table_VD, ids_T[static_cast<size_t>(t)], out_TD.row(t));
  }

  void do_gather(Rows<const float> x, std::span<const int32_t> indices, Rows<float> out) override {
    for (int64_t t = 0; t < out.rows; ++t)
      std::copy_n(x.row(indices[static_cast<size_t>(t)]), x.cols, out.row(t));
  }

  void do_rms_norm(Rows<const float> x, const float* weight, float eps, Rows<float> out) override {
    for (int64_t t = 0; t < x.rows; ++t) {
      double sum = 0;
      for (int64_t i = 0; i < x.cols; ++i) sum += static_cast<double>(x.row(t)[i]) * x.row(t)[i];
      float scale = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(x.cols) + eps));
      for (int64_t i = 0; i < x.cols; ++i) out.row(t)[i] = x.row(t)[i] * scale * weight[i];
    }
  }

  void do_linear(Rows<const float> x, const Matrix& w, Rows<float> out) override {
    constexpr int64_t kRowsATask = 16;
    pool_.parallel_for((w.n + kRowsATask - 1) / kRowsATask, [&](int64_t task) {
      std::vector<float> weights(static_cast<size_t>(w.k));
      for (int64_t n = task * kRowsATask; n < std::min(w.n, (task + 1) * kRowsATask); ++n) {
        dequantize_row(w, n, weights.data());
        // Four rows at a time: four independent sums keep a scalar core busy, each in the same order as
        // alone.
        for (int64_t t = 0; t < x.rows; t += 4) {
          const int64_t last = x.rows - 1;
          const float* rows[4] = {x.row(t), x.row(std::min(t + 1, last)), x.row(std::min(t + 2, last)),
                                  x.row(std::min(t + 3, last))};
          double sums[4] = {};
          for (int64_t i = 0; i < w.k; ++i) {
            const double weight = weights[static_cast<size_t>(i)];
            for (int64_t r = 0; r < 4; ++r) sums[r] += rows[r][i] * weight;
          }
          for (int64_t r = 0; r < std::min<int64_t>(4, x.rows - t); ++r)
            out.row(t + r)[n] = static_cast<float>(sums[r]);
        }
      }
    });
  }

  void do_rope_table(const int32_t* positions_T, std::span<const float> inv_freq, float factor,
                     Rows<float> out) override {
    for (int64_t t = 0; t < out.rows; ++t)
      rope_table_row_on_host(positions_T[t], inv_freq, factor, out.row(t));
  }

  void do_rope(Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style,
               int64_t offset) override {
    const int64_t half = table.cols / 2;
    const bool halves = style == RopeStyle::kHalves;
    const int64_t step = halves ? 1 : 2, partner = halves ? half : 1;
    for (int64_t t = 0; t < x.rows; ++t) {
      const float* cosines = table.row(t);
      const float* sines = cosines + half;
      for (float* head = x.row(t); head < x.row(t) + x.cols; head += head_dim) {
        for (int64_t i = 0; i < half; ++i) {
          float& first = head[offset + i * step];
          float& second = head[offset + i * step + partner];
          const float a = first, b = second;
          first = a * cosines[i] - b * sines[i];
          second = b * cosines[i] + a * sines[i];
        }
      }
    }
  }

  void do_write_kv(Rows<const float> k, Rows<const float> v, const RowsOfStep& rows,
                   const KvView& kv) override {
    for (int64_t t = 0; t < k.rows; ++t) {
      for (int64_t g = 0; g < kv.kv_heads; ++g) {
        const int64_t at = place(kv, rows.slots_T[t], rows.positions_T[t], g), width = kv.value_width();
        std::copy_n(k.row(t) + g * kv.head_dim, kv.head_dim, kv.keys + at * kv.head_dim);
        std::copy_n(v.row(t) + g * width, width, kv.values + at * width);
      }
    }
  }

  void do_attend(const AttendArgs& args) override {
    const KvView& kv = args.kv;
    const int64_t heads = args.q.cols / kv.head_dim, group = heads / kv.kv_heads;
    const int64_t width = kv.value_width();
    pool_.parallel_for(args.q.rows * heads, [&](int64_t task) {
      const int64_t t = task / heads, h = task % heads, g = h / group;
      const int32_t slot = args.rows.slots_T[t], last = args.rows.positions_T[t];
      const int64_t first = args.window > 0 ? std::max<int64_t>(0, last - args.window + 1) : 0;
      const float* q = args.q.row(t) + h * kv.head_dim;
      std::vector<double> scores;
      const double sink = args.sinks_H != nullptr ? args.sinks_H[h] : -INFINITY;
      double top = sink;
      for (int64_t i = first; i <= last; ++i) {
        const float* key = kv.keys + place(kv, slot, i, g) * kv.head_dim;
        double dot = 0;
        for (int64_t c = 0; c < kv.head_dim; ++c) dot += static_cast<double>(q[c]) * key[c];
        scores.push_back(dot * args.scale);
        top = std::max(top, scores.back());
      }
      double sum = std::exp(sink - top);
      for (double& score : scores) sum += score = std::exp(score - top);
      std::vector<double> out(static_cast<size_t>(width), 0.0);
      for (int64_t i = first; i <= last; ++i) {
        const float* value = kv.values + place(kv, slot, i, g) * width;
        double p = scores[static_cast<size_t>(i - first)] / sum;
        for (int64_t c = 0; c < width; ++c) out[static_cast<size_t>(c)] += p * value[c];
      }
      for (int64_t c = 0; c < width; ++c) {
        args.out.row(t)[h * width + c] = static_cast<float>(out[static_cast<size_t>(c)]);
      }
    });
    if (args.gate_kind != OutputGate::kNone) do_gate_output(args.gate_kind, args.gate, width, args.out);
  }

  void do_gate_output(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<float> x) override {
    for (int64_t t = 0; t < x.rows; ++t) {
      for (int64_t i = 0; i < x.cols; ++i) {
        const float g = gate.row(t)[kind == OutputGate::kSoftplusHead ? i / head_dim : i];
        x.row(t)[i] *= kind == OutputGate::kSigmoidElement ? 1.0f / (1.0f + std::exp(-g)) : softplus(g);
      }
    }
  }

  void do_activate(const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up,
                   Rows<float> out) override {
    for (int64_t t = 0; t < gate.rows; ++t) {
      for (int64_t i = 0; i < gate.cols; ++i) out.row(t)[i] = activated(spec, gate.row(t)[i], up.row(t)[i]);
    }
  }

  void do_add(Rows<const float> y, Rows<float> x) override {
    for (int64_t t = 0; t < x.rows; ++t) {
      for (int64_t i = 0; i < x.cols; ++i) x.row(t)[i] += y.row(t)[i];
    }
  }

  void do_add_bias(Rows<float> x, const float* bias) override {
    for (int64_t t = 0; t < x.rows; ++t) {
      for (int64_t i = 0; i < x.cols; ++i) x.row(t)[i] += bias[i];
    }
  }

  void do_route(const RouteArgs& args) override { route_on_host(args); }

 private:
  // Which vector of keys, and of values.
  static int64_t place(const KvView& kv, int32_t slot, int64_t position, int64_t g) {
    int64_t page = kv.table[slot * kv.table_pages + (position / kv.page_tokens) % kv.table_pages];
    return (page * kv.kv_heads + g) * kv.page_tokens + position % kv.page_tokens;
  }

  ThreadPool pool_;
};

}  // namespace

std::unique_ptr<Ops> make_reference_ops(int threads) { return std::make_unique<ReferenceOps>(threads); }

}  // namespace nibble
