#include "ops/ops.h"

#include <algorithm>
#include <vector>

#include "quant/nvfp4.h"

namespace nibble {
namespace {

template <class A, class B>
bool same_shape(const Rows<A>& a, const Rows<B>& b) {
  return a.rows == b.rows && a.cols == b.cols;
}

bool is_matrix(const Matrix& m, int64_t n, int64_t k) {
  const MatrixFormatInfo& info = matrix_format_info(m.format);
  return !m.empty() && m.n == n && m.k == k && k % info.group == 0 &&
         (m.scales != nullptr || info.scale_bytes == 0 || m.tiled);
}

bool is_activation(const ActivationSpec& spec) {
  return spec.kind == ActivationSpec::kSilu || spec.limit > 0;
}

void check_gate(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<const float> x) {
  NIBBLE_CHECK(gate.rows == x.rows && head_dim > 0 && x.cols % head_dim == 0);
  NIBBLE_CHECK(gate.cols == (kind == OutputGate::kSoftplusHead ? x.cols / head_dim : x.cols));
}

void check_products(Rows<const float> x, std::span<const Product> products) {
  for (const Product& p : products) {
    NIBBLE_CHECK(is_matrix(p.weight, p.out.cols, x.cols) && x.rows == p.out.rows);
    NIBBLE_CHECK(p.add_to.data == nullptr || same_shape(p.add_to, p.out));
  }
}

void check_route(const RouteArgs& args) {
  NIBBLE_CHECK(same_shape(args.ids, args.weights) && args.ids.rows == args.logits.rows);
  const RouterSpec& spec = args.spec;
  NIBBLE_CHECK(spec.n_group > 0 && args.logits.cols % spec.n_group == 0);
  NIBBLE_CHECK(spec.topk_group > 0 && spec.topk_group <= spec.n_group);
  NIBBLE_CHECK(args.ids.cols > 0 && args.ids.cols <= args.logits.cols / spec.n_group * spec.topk_group);
}

void check_kv(const KvView& kv) {
  NIBBLE_CHECK(kv.keys != nullptr && kv.values != nullptr && kv.table != nullptr);
  NIBBLE_CHECK(kv.page_tokens > 0 && kv.table_pages > 0 && kv.kv_heads > 0 && kv.head_dim > 0 &&
               kv.value_dim >= 0);
}

void check_attend(const AttendArgs& args) {
  check_kv(args.kv);
  NIBBLE_CHECK(args.q.rows == args.out.rows && args.q.rows == args.rows.count && args.window >= 0);
  NIBBLE_CHECK(args.q.cols % (args.kv.head_dim * args.kv.kv_heads) == 0);
  NIBBLE_CHECK(args.out.cols == args.q.cols / args.kv.head_dim * args.kv.value_width());
  if (args.gate_kind != OutputGate::kNone)
    check_gate(args.gate_kind, args.gate, args.kv.value_width(), args.out);
}

void check_prepare_attend(const PrepareAttendArgs& args) {
  const KvView& kv = args.kv;
  check_kv(kv);
  const int64_t rows = args.rows.count, rotary_dim = args.rope_table.cols;
  NIBBLE_CHECK(args.q.rows == rows && args.k.rows == rows && args.v.rows == rows &&
               args.rope_table.rows == rows);
  NIBBLE_CHECK(args.q.cols % (kv.head_dim * kv.kv_heads) == 0 && args.k.cols == kv.kv_heads * kv.head_dim &&
               args.v.cols == kv.kv_heads * kv.value_width());
  NIBBLE_CHECK(rotary_dim % 2 == 0 && rotary_dim <= kv.head_dim);
}

}  // namespace

void Ops::embed(std::span<const int32_t> ids_T, const Matrix& table_VD, Rows<float> out_TD) {
  NIBBLE_CHECK(static_cast<int64_t>(ids_T.size()) == out_TD.rows && table_VD.k == out_TD.cols);
  do_embed(ids_T, table_VD, out_TD);
}

void Ops::gather(Rows<const float> x, std::span<const int32_t> indices, Rows<float> out) {
  NIBBLE_CHECK(static_cast<int64_t>(indices.size()) == out.rows && x.cols == out.cols);
  do_gather(x, indices, out);
}

void Ops::rms_norm(Rows<const float> x, const float* weight, float eps, Rows<float> out) {
  NIBBLE_CHECK(same_shape(x, out) && weight != nullptr);
  do_rms_norm(x, weight, eps, out);
}

void Ops::linear(Rows<const float> x, const Matrix& w, Rows<float> out) {
  NIBBLE_CHECK(x.rows == out.rows && is_matrix(w, out.cols, x.cols));
  do_linear(x, w, out);
}

void Ops::exact_linear(Rows<const float> x, const Matrix& w, Rows<float> out) {
  NIBBLE_CHECK(x.rows == out.rows && is_matrix(w, out.cols, x.cols));
  do_exact_linear(x, w, out);
}

void Ops::do_exact_linear(Rows<const float> x, const Matrix& w, Rows<float> out) { do_linear(x, w, out); }

void Ops::rope_table(const int32_t* positions_T, std::span<const float> inv_freq, float factor,
                     Rows<float> out) {
  NIBBLE_CHECK(positions_T != nullptr && out.cols == 2 * static_cast<int64_t>(inv_freq.size()));
  do_rope_table(positions_T, inv_freq, factor, out);
}

void Ops::rope(Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style, int64_t offset) {
  NIBBLE_CHECK(x.rows == table.rows && head_dim > 0 && x.cols % head_dim == 0);
  NIBBLE_CHECK(table.cols % 2 == 0 && offset >= 0 && offset + table.cols <= head_dim);
  do_rope(x, head_dim, table, style, offset);
}

void Ops::write_kv(Rows<const float> k, Rows<const float> v, const RowsOfStep& rows, const KvView& kv) {
  check_kv(kv);
  NIBBLE_CHECK(k.rows == rows.count && k.cols == kv.kv_heads * kv.head_dim);
  NIBBLE_CHECK(v.rows == rows.count && v.cols == kv.kv_heads * kv.value_width());
  do_write_kv(k, v, rows, kv);
}

void Ops::attend(const AttendArgs& args) {
  check_attend(args);
  do_attend(args);
}

void Ops::prepare_attend(const PrepareAttendArgs& args) {
  check_prepare_attend(args);
  do_prepare_attend(args);
}

void Ops::prepare_and_attend(const PrepareAttendArgs& prepare, const AttendArgs& args) {
  check_prepare_attend(prepare);
  check_attend(args);
  NIBBLE_CHECK(args.q.data == prepare.q.data && args.q.cols == prepare.q.cols);
  do_prepare_and_attend(prepare, args);
}

void Ops::do_prepare_and_attend(const PrepareAttendArgs& prepare, const AttendArgs& args) {
  do_prepare_attend(prepare);
  do_attend(args);
}

void Ops::do_prepare_attend(const PrepareAttendArgs& args) {
  const int64_t dim = args.kv.head_dim;
  auto prepare = [&](Rows<float> x, const float* weight) {
    if (weight != nullptr) {
      for (int64_t at = 0; at < x.cols; at += dim) {
        const Rows<float> head(x.data + at, x.rows, dim, x.stride);
        rms_norm(head, weight, args.eps, head);
      }
    }
    rope(x, dim, args.rope_table, args.rope_style);
  };
  prepare(args.q, args.q_norm);
  prepare(args.k, args.k_norm);
  write_kv(args.k, args.v, args.rows, args.kv);
}

void Ops::gate_output(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<float> x) {
  NIBBLE_CHECK(kind != OutputGate::kNone);
  check_gate(kind, gate, head_dim, x);
  do_gate_output(kind, gate, head_dim, x);
}

void Ops::activate(const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up,
                   Rows<float> out) {
  NIBBLE_CHECK(same_shape(gate, up) && same_shape(gate, out) && is_activation(spec));
  do_activate(spec, gate, up, out);
}

void Ops::add(Rows<const float> y, Rows<float> x) {
  NIBBLE_CHECK(same_shape(y, x));
  do_add(y, x);
}

void Ops::add_bias(Rows<float> x, const float* bias) {
  NIBBLE_CHECK(bias != nullptr);
  do_add_bias(x, bias);
}

void Ops::route(const RouteArgs& args) {
  check_route(args);
  do_route(args);
}

void Ops::routed_ffn(const RouteArgs& route, const ExpertFfnArgs& args, const SharedExpert* shared) {
  NIBBLE_CHECK(route.ids.data == args.ids.data && route.weights.data == args.weights.data);
  check_route(route);
  check_expert_ffn(args);
  if (shared != nullptr) {
    NIBBLE_CHECK(same_shape(shared->gate, shared->up) && same_shape(shared->out, args.out));
    NIBBLE_CHECK(shared->gate.rows == args.x.rows && is_matrix(shared->down, args.x.cols, shared->gate.cols));
  }
  do_routed_ffn(route, args, shared);
}

void Ops::do_routed_ffn(const RouteArgs& route, const ExpertFfnArgs& args, const SharedExpert* shared) {
  do_route(route);
  do_expert_ffn(args);
  if (shared != nullptr) {
    do_glu_linear(args.activation, shared->gate, shared->up,
                  {shared->down, nullptr, shared->out, args.sum()});
  }
}

void Ops::linears(Rows<const float> x, std::span<const Product> products) {
  check_products(x, products);
  do_linears(x, products);
}

void Ops::norm_linears(Rows<const float> x, const float* weight, float eps, Rows<float> normed,
                       std::span<const Product> products) {
  NIBBLE_CHECK(same_shape(x, normed) && weight != nullptr);
  check_products(x, products);
  do_norm_linears(x, weight, eps, normed, products);
}

void Ops::do_norm_linears(Rows<const float> x, const float* weight, float eps, Rows<float> normed,
                          std::span<const Product> products) {
  rms_norm(x, weight, eps, normed);
  do_linears(normed, products);
}

void Ops::glu_linear(const ActivationSpec& spec, Rows<float> gate, Rows<const float> up,
                     const Product& product) {
  NIBBLE_CHECK(same_shape(gate, up) && is_activation(spec));
  check_products(gate, {&product, 1});
  do_glu_linear(spec, gate, up, product);
}

void Ops::do_glu_linear(const ActivationSpec& spec, Rows<float> gate, Rows<const float> up,
                        const Product& product) {
  activate(spec, gate, up, gate);
  do_linears(gate, {&product, 1});
}

void Ops::do_linears(Rows<const float> x, std::span<const Product> products) {
  for (const Product& p : products) {
    linear(x, p.weight, p.out);
    if (p.bias != nullptr) add_bias(p.out, p.bias);
    if (p.add_to.data != nullptr) add(p.out, p.add_to);
  }
}

Result<std::unique_ptr<PlacedExperts>> Ops::place_experts(std::span<const ExpertWeights> host_experts,
                                                          ExpertsOf whose) {
  NIBBLE_CHECK(!host_experts.empty());
  const int64_t i = host_experts[0].gate.n, d = host_experts[0].gate.k;
  for (const ExpertWeights& w : host_experts) {
    NIBBLE_CHECK(is_matrix(w.gate, i, d) && is_matrix(w.up, i, d) && is_matrix(w.down, d, i));
  }
  return do_place_experts(host_experts, whose);
}

Result<std::unique_ptr<PlacedExperts>> Ops::do_place_experts(std::span<const ExpertWeights> host_experts,
                                                             ExpertsOf /*whose*/) {
  std::vector<ExpertWeights> placed(host_experts.begin(), host_experts.end());
  for (ExpertWeights& expert : placed) {
    for (Matrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      NIBBLE_ASSIGN_OR_RETURN(*matrix, place(*matrix));
    }
  }
  return std::make_unique<PlacedExperts>(std::move(placed));
}

void Ops::check_expert_ffn(const ExpertFfnArgs& args) const {
  NIBBLE_CHECK(same_shape(args.ids, args.weights) && args.ids.rows == args.x.rows &&
               same_shape(args.x, args.out));
  const int64_t routed_rows = args.ids.rows * args.ids.cols;
  const int64_t d = args.x.cols, i = args.experts.expert_width();
  NIBBLE_CHECK(args.experts.model_width() == d);
  const ExpertScratch& s = args.scratch;
  NIBBLE_CHECK(s.gathered.rows >= routed_rows && s.gathered.cols == d && s.down.rows >= routed_rows &&
               s.down.cols == d);
  NIBBLE_CHECK(s.gate.rows >= routed_rows && s.gate.cols == i && s.up.rows >= routed_rows && s.up.cols == i);
  NIBBLE_CHECK(is_activation(args.activation));
  NIBBLE_CHECK(args.add_to.data == nullptr || same_shape(args.add_to, args.out));
  NIBBLE_CHECK(!args.arithmetic.w4a4 || (does_w4a4() && d % nvfp4::kGroup == 0 && i % nvfp4::kGroup == 0));
}

void Ops::top_logits(Rows<const float> logits_TV, Rows<TokenLogit> out) {
  NIBBLE_CHECK(logits_TV.rows == out.rows && out.cols >= 1 && out.cols <= kTopLogits &&
               out.cols <= logits_TV.cols && logits_TV.cols < INT64_C(1) << 28);
  do_top_logits(logits_TV, out);
}

void Ops::expert_ffn(const ExpertFfnArgs& args) {
  check_expert_ffn(args);
  do_expert_ffn(args);
}

}  // namespace nibble
