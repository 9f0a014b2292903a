// Operations on the tests' own data, on backends of any memory: what a call reads is brought into the
// backend's memory, and what it may write comes back, with the gaps between rows. Two arguments that are the
// same bytes of the test are the same bytes of the backend.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ops/backend.h"

namespace nibble::testing {

class OnHostData {
 public:
  explicit OnHostData(std::unique_ptr<Ops> ops) : ops_(std::move(ops)) {}
  Ops& ops() { return *ops_; }

  void embed(std::span<const int32_t> ids_T, const Matrix& table_VD, Rows<float> out_TD) {
    Call call(*this);
    const Matrix table = place(table_VD, MatrixUse::kEmbedding);
    ops_->embed({call.in(ids_T.data(), std::ssize(ids_T)), ids_T.size()}, table, call.out(out_TD));
  }
  void gather(Rows<const float> x, std::span<const int32_t> indices, Rows<float> out) {
    Call call(*this);
    ops_->gather(call.in(x), {call.in(indices.data(), std::ssize(indices)), indices.size()}, call.out(out));
  }
  void rms_norm(Rows<const float> x, const float* weight, float eps, Rows<float> out) {
    Call call(*this);
    ops_->rms_norm(call.in(x), call.in(weight, x.cols), eps, call.out(out));
  }
  void layer_norm(Rows<const float> x, const float* weight, const float* bias, float eps, Rows<float> out) {
    Call call(*this);
    ops_->layer_norm(call.in(x), call.in(weight, x.cols), call.in(bias, x.cols), eps, call.out(out));
  }
  void linear(Rows<const float> x, const Matrix& w, Rows<float> out) {
    Call call(*this);
    ops_->linear(call.in(x), place(w), call.out(out));
  }
  void top_logits(Rows<const float> logits_TV, Rows<TokenLogit> out) {
    Call call(*this);
    ops_->top_logits(call.in(logits_TV), call.out(out));
  }
  struct HostProduct {
    Matrix weight;
    const float* bias;
    Rows<float> out;
    Rows<float> add_to = {};
  };
  void linears(Rows<const float> x, std::span<const HostProduct> products) {
    Call call(*this);
    std::vector<Matrix> placed;
    ops_->linears(call.in(x), bring_products(call, products, placed));
  }
  void norm_linears(Rows<const float> x, const float* weight, float eps, Rows<float> normed,
                    std::span<const HostProduct> products) {
    Call call(*this);
    std::vector<Matrix> placed;
    ops_->norm_linears(call.in(x), call.in(weight, x.cols), eps, call.out(normed),
                       bring_products(call, products, placed));
  }
  void glu_linear(const ActivationSpec& spec, Rows<float> gate, Rows<const float> up,
                  const HostProduct& product) {
    Call call(*this);
    std::vector<Matrix> placed;
    ops_->glu_linear(spec, call.out(gate), call.in(up), bring_products(call, {&product, 1}, placed)[0]);
  }
  void prepare_attend(PrepareAttendArgs args) {
    Call call(*this);
    bring_prepare(call, args);
    ops_->prepare_attend(args);
  }
  void prepare_and_attend(PrepareAttendArgs prepare, AttendArgs args) {
    Call call(*this);
    bring_prepare(call, prepare);
    bring_attend(call, args);
    ops_->prepare_and_attend(prepare, args);
  }
  void linear_heads(Rows<const float> x, int64_t x_head, std::span<const Matrix> w_H, Rows<float> out,
                    int64_t out_head) {
    Call call(*this);
    std::vector<Matrix> placed;
    for (const Matrix& w : w_H) placed.push_back(place(w));
    ops_->linear_heads(call.in(x), x_head, placed, call.out(out), out_head);
  }
  void rope_table(const int32_t* positions_T, std::span<const float> inv_freq, float factor,
                  Rows<float> out) {
    Call call(*this);
    ops_->rope_table(call.in(positions_T, out.rows),
                     {call.in(inv_freq.data(), std::ssize(inv_freq)), inv_freq.size()}, factor,
                     call.out(out));
  }
  void rope(Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style = RopeStyle::kHalves,
            int64_t offset = 0) {
    Call call(*this);
    ops_->rope(call.out(x), head_dim, call.in(table), style, offset);
  }
  void write_kv(Rows<const float> k, Rows<const float> v, const RowsOfStep& rows, const KvView& kv) {
    Call call(*this);
    ops_->write_kv(call.in(k), call.in(v), call.in(rows), call.kv(kv, rows));
  }
  void attend(AttendArgs args) {
    Call call(*this);
    bring_attend(call, args);
    ops_->attend(args);
  }
  void attend_selected(AttendArgs args, Selection selection) {
    Call call(*this);
    bring_attend(call, args);
    ops_->attend_selected(args, call.out(selection));
  }
  void index_select(IndexSelectArgs args) {
    Call call(*this);
    args.q = call.in(args.q);
    args.weights = call.in(args.weights);
    args.ape = call.in(args.ape, args.pool * args.kv.head_dim);
    args.kv = call.kv(args.kv, args.rows);
    args.rows = call.in(args.rows);
    args.out = call.out(args.out);
    ops_->index_select(args);
  }
  void causal_conv(CausalConvArgs args) {
    Call call(*this);
    args.state = call.out(args.state, slots(args.rows) * (args.taps - 1) * args.x.cols);
    args.x = call.in(args.x);
    args.weight = call.in(args.weight, args.x.cols * args.taps);
    args.rows = call.in(args.rows);
    args.out = call.out(args.out);
    ops_->causal_conv(args);
  }
  void kda(KdaArgs args) {
    Call call(*this);
    args.state = call.out(args.state, slots(args.rows) * args.q.cols * args.q.cols / args.beta.cols);
    for (Rows<const float>* x : {&args.q, &args.k, &args.v, &args.decay, &args.beta}) *x = call.in(*x);
    args.dt_bias = call.in(args.dt_bias, args.q.cols);
    args.a_log = call.in(args.a_log, args.beta.cols);
    args.rows = call.in(args.rows);
    args.out = call.out(args.out);
    ops_->kda(args);
  }
  void gate_output(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<float> x) {
    Call call(*this);
    ops_->gate_output(kind, call.in(gate), head_dim, call.out(x));
  }
  void activate(const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up, Rows<float> out) {
    Call call(*this);
    ops_->activate(spec, call.in(gate), call.in(up), call.out(out));
  }
  void add(Rows<const float> y, Rows<float> x) {
    Call call(*this);
    ops_->add(call.in(y), call.out(x));
  }
  void add_bias(Rows<float> x, const float* bias) {
    Call call(*this);
    ops_->add_bias(call.out(x), call.in(bias, x.cols));
  }
  void copy(Rows<const float> x, Rows<float> out) {
    Call call(*this);
    ops_->copy(call.in(x), call.out(out));
  }
  void hyper_weights(const HyperSpec& spec, const float* base, const float* scale, Rows<float> mix) {
    Call call(*this);
    ops_->hyper_weights(spec, call.in(base, spec.mix_width()), call.in(scale, 3), call.out(mix));
  }
  void hyper_collect(const HyperSpec& spec, Rows<const float> streams, Rows<const float> mix,
                     Rows<float> out) {
    Call call(*this);
    ops_->hyper_collect(spec, call.in(streams), call.in(mix), call.out(out));
  }
  void hyper_distribute(const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                        Rows<float> streams) {
    Call call(*this);
    ops_->hyper_distribute(spec, call.in(y), call.in(mix), call.out(streams));
  }
  void hyper_mean(const HyperSpec& spec, Rows<const float> streams, Rows<float> out) {
    Call call(*this);
    ops_->hyper_mean(spec, call.in(streams), call.out(out));
  }
  void route(RouteArgs args) {
    Call call(*this);
    ops_->route(bring_route(call, args));
  }
  // REQUIRES that the experts' bytes live as long as this.
  std::unique_ptr<PlacedExperts> place_experts(std::span<const ExpertWeights> host) {
    std::vector<ExpertWeights> experts(host.begin(), host.end());
    for (ExpertWeights& w : experts) {
      w.gate_bias = keep(w.gate_bias, w.gate.n);
      w.up_bias = keep(w.up_bias, w.up.n);
      w.down_bias = keep(w.down_bias, w.down.n);
    }
    return ops_->place_experts(experts).value();
  }
  // The scratch comes back as well: a test may look at what is left in it.
  void expert_ffn(const ExpertFfnArgs& args) {
    Call call(*this);
    ops_->expert_ffn(bring_experts(call, args));
  }
  void routed_ffn(const RouteArgs& route, const ExpertFfnArgs& args, const SharedExpert* shared = nullptr) {
    Call call(*this);
    const RouteArgs route_on_device = bring_route(call, route);
    const ExpertFfnArgs experts = bring_experts(call, args);
    if (shared == nullptr) return ops_->routed_ffn(route_on_device, experts);
    const Matrix down = place(shared->down, MatrixUse::kSharedDown);
    const SharedExpert shared_on_device = {call.out(shared->gate), call.in(shared->up), down,
                                           call.out(shared->out)};
    ops_->routed_ffn(route_on_device, experts, &shared_on_device);
  }

 private:
  // The data of one call; what it may have written comes back at its end.
  class Call {
   public:
    explicit Call(OnHostData& home) : home_(home), memory_(home.ops_->memory()) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      for (const Piece& piece : pieces_) {
        if (piece.written) memory_.download(piece.host, piece.buffer.as<void>(), piece.buffer.bytes());
      }
    }

    template <class T>
    const T* in(const T* host, int64_t count) {
      return bring(host, count, false);
    }
    template <class T>
    T* out(T* host, int64_t count) {
      return bring(host, count, true);
    }
    template <class T>
    Rows<const T> in(Rows<const T> x) {
      return {in(x.data, extent(x)), x.rows, x.cols, x.stride};
    }
    template <class T>
    Rows<T> out(Rows<T> x) {
      return {out(x.data, extent(x)), x.rows, x.cols, x.stride};
    }
    Selection out(const Selection& s) { return {out(s.positions), out(s.counts, s.positions.rows)}; }
    RowsOfStep in(const RowsOfStep& rows) {
      return {rows.count, in(rows.positions_T, rows.count), in(rows.slots_T, rows.count),
              rows.one_a_sequence, rows.one_sequence};
    }
    // The pages that the tables of the step's sequences name.
    KvView kv(KvView kv, const RowsOfStep& host_rows) {
      const int64_t entries = slots(host_rows) * kv.table_pages;
      const int64_t pages = entries > 0 ? *std::max_element(kv.table, kv.table + entries) + 1 : 0;
      const int64_t heads = pages * kv.page_tokens * kv.kv_heads;
      kv.keys = out(kv.keys, heads * kv.head_dim);
      kv.values = out(kv.values, heads * kv.value_width());
      kv.table = in(kv.table, entries);
      return kv;
    }

   private:
    struct Piece {
      char* host;
      Buffer buffer;
      bool written;
    };

    template <class T>
    static int64_t extent(const Rows<T>& x) {
      return x.rows > 0 ? (x.rows - 1) * x.stride + x.cols : 0;
    }

    template <class T>
    T* bring(T* host, int64_t count, bool written) {
      if (home_.in_place_) return host;
      using Bytes = std::remove_const_t<T>;
      char* begin = reinterpret_cast<char*>(const_cast<Bytes*>(host));
      const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
      for (Piece& piece : pieces_) {
        const int64_t at = begin - piece.host;
        if (at + bytes <= 0 || at >= piece.buffer.bytes()) continue;
        NIBBLE_CHECK(at >= 0 &&
                     at + bytes <= piece.buffer.bytes());  // overlap in part: bring the larger first
        piece.written |= written;
        return reinterpret_cast<T*>(piece.buffer.as<char>() + at);
      }
      Buffer buffer = Buffer::allocate(memory_, bytes, "test data").value();
      memory_.upload(buffer.as<void>(), begin, bytes);
      pieces_.push_back({begin, std::move(buffer), written});
      return pieces_.back().buffer.as<T>();
    }

    OnHostData& home_;
    Memory& memory_;
    std::vector<Piece> pieces_;
  };

  static int64_t slots(const RowsOfStep& host_rows) {
    return host_rows.count > 0 ? *std::max_element(host_rows.slots_T, host_rows.slots_T + host_rows.count) + 1
                               : 0;
  }
  static void bring_prepare(Call& call, PrepareAttendArgs& args) {
    args.q = call.out(args.q);
    args.k = call.out(args.k);
    args.v = call.in(args.v);
    if (args.q_norm != nullptr) args.q_norm = call.in(args.q_norm, args.kv.head_dim);
    if (args.k_norm != nullptr) args.k_norm = call.in(args.k_norm, args.kv.head_dim);
    args.rope_table = call.in(args.rope_table);
    args.kv = call.kv(args.kv, args.rows);
    args.rows = call.in(args.rows);
  }
  void bring_attend(Call& call, AttendArgs& args) {
    const int64_t heads = args.q.cols / args.kv.head_dim;
    args.q = call.in(args.q);
    args.kv = call.kv(args.kv, args.rows);
    args.rows = call.in(args.rows);
    args.out = call.out(args.out);
    if (args.sinks_H != nullptr) args.sinks_H = call.in(args.sinks_H, heads);
    if (args.gate_kind != OutputGate::kNone) args.gate = call.in(args.gate);
  }
  RouteArgs bring_route(Call& call, RouteArgs args) {
    args.logits = call.in(args.logits);
    if (args.bias_E != nullptr) args.bias_E = call.in(args.bias_E, args.logits.cols);
    args.ids = call.out(args.ids);
    args.weights = call.out(args.weights);
    return args;
  }
  ExpertFfnArgs bring_experts(Call& call, const ExpertFfnArgs& args) {
    const ExpertScratch& s = args.scratch;
    return {call.in(args.x),
            call.in(args.ids),
            call.in(args.weights),
            args.experts,
            args.activation,
            {call.out(s.gathered), call.out(s.gate), call.out(s.up), call.out(s.down)},
            call.out(args.out),
            args.arithmetic,
            args.add_to.data != nullptr ? call.out(args.add_to) : Rows<float>()};
  }
  // `placed` has what the products point to.
  std::vector<Product> bring_products(Call& call, std::span<const HostProduct> products,
                                      std::vector<Matrix>& placed) {
    for (const HostProduct& p : products) placed.push_back(place(p.weight));
    std::vector<Product> on_device;
    for (size_t i = 0; i < products.size(); ++i) {
      const HostProduct& p = products[i];
      on_device.push_back({placed[i], p.bias == nullptr ? nullptr : call.in(p.bias, p.out.cols),
                           call.out(p.out), p.add_to.data != nullptr ? call.out(p.add_to) : Rows<float>()});
    }
    return on_device;
  }
  Matrix place(const Matrix& w, MatrixUse use = MatrixUse::kProducts) { return ops_->place(w, use).value(); }
  const float* keep(const float* host, int64_t count) {
    if (host == nullptr || in_place_) return host;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
    kept_.push_back(Buffer::allocate(ops_->memory(), bytes, "test data").value());
    ops_->memory().upload(kept_.back().as<void>(), host, bytes);
    return kept_.back().as<float>();
  }

  std::unique_ptr<Ops> ops_;
  std::vector<Buffer> kept_;
  // The cpu backend works on the tests' own bytes: sanitizers watch their ends, and rows stand at any
  // address.
  const bool in_place_ = ops_->name() == "cpu";
};

}  // namespace nibble::testing
