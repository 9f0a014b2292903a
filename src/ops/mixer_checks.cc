// The public methods of the operations in mixer_args.h: shapes, then the backend.
#include "ops/ops.h"

namespace nibble {
namespace {

template <class A, class B>
void check_same(const Rows<A>& a, const Rows<B>& b) {
  NIBBLE_CHECK(a.rows == b.rows && a.cols == b.cols);
}

void check_streams(const HyperSpec& spec, const Rows<const float>& streams, int64_t width) {
  NIBBLE_CHECK(spec.streams > 0 && streams.cols == spec.streams * width);
}

}  // namespace

void Ops::attend_selected(const AttendArgs& args, const Selection& selection) {
  NIBBLE_CHECK(args.kv.keys != nullptr && args.kv.values != nullptr && args.sinks_H == nullptr &&
               args.gate_kind == OutputGate::kNone);
  NIBBLE_CHECK(args.q.cols % (args.kv.head_dim * args.kv.kv_heads) == 0 && args.q.rows == args.rows.count);
  NIBBLE_CHECK(args.out.rows == args.q.rows &&
               args.out.cols == args.q.cols / args.kv.head_dim * args.kv.value_width());
  NIBBLE_CHECK(selection.positions.rows == args.q.rows && selection.counts != nullptr);
  do_attend_selected(args, selection);
}

void Ops::index_select(const IndexSelectArgs& args) {
  NIBBLE_CHECK(args.pool > 0 && args.top_k > 0 && args.top_k % args.pool == 0 && args.ape != nullptr);
  NIBBLE_CHECK(args.kv.kv_heads == 1 && args.q.cols == args.weights.cols * args.kv.head_dim);
  NIBBLE_CHECK(args.q.rows == args.rows.count && args.weights.rows == args.rows.count);
  NIBBLE_CHECK(args.out.positions.rows == args.rows.count &&
               args.out.positions.cols >= args.top_k + args.pool - 1);
  do_index_select(args);
}

void Ops::causal_conv(const CausalConvArgs& args) {
  check_same(args.x, args.out);
  NIBBLE_CHECK(args.taps >= 2 && args.weight != nullptr && args.state != nullptr &&
               args.x.rows == args.rows.count);
  do_causal_conv(args);
}

void Ops::kda(const KdaArgs& args) {
  for (const Rows<const float>* x : {&args.k, &args.v, &args.decay}) check_same(args.q, *x);
  check_same(args.q, args.out);
  NIBBLE_CHECK(args.beta.rows == args.q.rows && args.q.cols % args.beta.cols == 0 &&
               args.q.rows == args.rows.count);
  NIBBLE_CHECK(args.dt_bias != nullptr && args.a_log != nullptr && args.state != nullptr);
  do_kda(args);
}

void Ops::copy(Rows<const float> x, Rows<float> out) {
  check_same(x, out);
  do_copy(x, out);
}

void Ops::layer_norm(Rows<const float> x, const float* weight, const float* bias, float eps,
                     Rows<float> out) {
  check_same(x, out);
  NIBBLE_CHECK(weight != nullptr && bias != nullptr);
  do_layer_norm(x, weight, bias, eps, out);
}

void Ops::linear_heads(Rows<const float> x, int64_t x_head, std::span<const Matrix> w_H, Rows<float> out,
                       int64_t out_head) {
  const auto heads = static_cast<int64_t>(w_H.size());
  NIBBLE_CHECK(heads > 0 && x.rows == out.rows);
  for (const Matrix& w : w_H) NIBBLE_CHECK(w.k <= x_head && w.n <= out_head);
  NIBBLE_CHECK((heads - 1) * x_head + w_H.back().k <= x.cols &&
               (heads - 1) * out_head + w_H.back().n <= out.cols);
  do_linear_heads(x, x_head, w_H, out, out_head);
}

void Ops::hyper_weights(const HyperSpec& spec, const float* base, const float* scale, Rows<float> mix) {
  NIBBLE_CHECK(mix.cols == spec.mix_width() && base != nullptr && scale != nullptr);
  do_hyper_weights(spec, base, scale, mix);
}

void Ops::hyper_collect(const HyperSpec& spec, Rows<const float> streams, Rows<const float> mix,
                        Rows<float> out) {
  check_streams(spec, streams, out.cols);
  NIBBLE_CHECK(mix.cols == spec.mix_width() && mix.rows == streams.rows && out.rows == streams.rows);
  do_hyper_collect(spec, streams, mix, out);
}

void Ops::hyper_distribute(const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                           Rows<float> streams) {
  check_streams(spec, streams, y.cols);
  NIBBLE_CHECK(mix.cols == spec.mix_width() && mix.rows == streams.rows && y.rows == streams.rows);
  do_hyper_distribute(spec, y, mix, streams);
}

void Ops::hyper_mean(const HyperSpec& spec, Rows<const float> streams, Rows<float> out) {
  check_streams(spec, streams, out.cols);
  NIBBLE_CHECK(streams.rows == out.rows);
  do_hyper_mean(spec, streams, out);
}

}  // namespace nibble
