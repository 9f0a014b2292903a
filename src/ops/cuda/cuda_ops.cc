#include "ops/cuda/cuda_ops.h"

#include <algorithm>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "base/numbers.h"
#include "ops/cuda/choices.h"
#include "ops/cuda/cuda_memory.h"
#include "ops/cuda/cuda_weights.h"
#include "ops/cuda/device.h"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/moe_path.h"
#include "ops/cuda/moe_workspace.h"
#include "ops/cuda/read_bandwidth.h"
#include "ops/cuda/tile_linear.h"
#include "ops/cuda/working_memory.h"

namespace nibble {
namespace {

using cuda::CudaExperts;
using cuda::DeviceMatrix;
using cuda::MatrixTable;

class Stream {
 public:
  Stream() { cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cuda::check(cudaStreamDestroy(stream_), "stream"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class CudaOps final : public Ops {
 public:
  CudaOps(cuda::Device device, const CudaOptions& options, cuda::MoePaths paths)
      : device_(std::move(device)),
        options_(options),
        paths_(std::move(paths)),
        weights_(memory_, stream(), device_, options.tensor_cores, paths_) {}
  ~CudaOps() override { forget_graphs(); }

  std::string_view name() const override { return "cuda"; }
  Memory& memory() override { return memory_; }
  std::string description() const override {
    return "cuda (" + device_.describe() + ")" + cuda::without_tensor_cores(device_, options_.tensor_cores);
  }
  std::vector<std::string> choices() const override {
    return cuda::choices(device_, options_.tensor_cores, options_.graphs, paths_);
  }
  int64_t working_bytes(const StepShape& largest) const override {
    return cuda::working_bytes(largest, paths_);
  }
  bool does_w4a4() const override { return options_.tensor_cores == "off"; }
  bool copies_weights(MatrixFormat /*format*/) const override { return true; }
  Result<double> read_bandwidth() override {
    return cuda::read_bandwidth(memory_, stream(), device_.multiprocessors);
  }

  Result<Matrix> place(const Matrix& host_matrix, MatrixUse use) override {
    return weights_.place(host_matrix, use);
  }

  // The first time runs it, so that its scratch is there; the second records it.
  void repeat(uint64_t key, const std::function<void()>& work) override {
    if (!options_.graphs) return work();
    auto [found, is_new] = graphs_.try_emplace(key, nullptr);
    if (is_new) return work();
    if (found->second == nullptr) {
      cudaGraph_t graph = nullptr;
      cuda::check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "recording of a step");
      work();
      cuda::check(cudaStreamEndCapture(stream(), &graph), "recording of a step");
      cuda::check(cudaGraphInstantiate(&found->second, graph, 0), "recording of a step");
      cuda::check(cudaGraphDestroy(graph), "recording of a step");
    }
    cuda::check(cudaGraphLaunch(found->second, stream()), "recorded step");
  }

 protected:
  Result<std::unique_ptr<PlacedExperts>> do_place_experts(std::span<const ExpertWeights> host_experts,
                                                          ExpertsOf whose) override {
    return weights_.place_experts(host_experts, whose);
  }

  void do_embed(std::span<const int32_t> ids_T, const Matrix& table_VD, Rows<float> out_TD) override {
    cuda::embed(stream(), ids_T.data(), table_VD, out_TD);
  }
  void do_gather(Rows<const float> x, std::span<const int32_t> indices, Rows<float> out) override {
    cuda::gather(stream(), x, indices.data(), out);
  }
  void do_rms_norm(Rows<const float> x, const float* weight, float eps, Rows<float> out) override {
    cuda::rms_norm(stream(), x, weight, eps, out);
  }
  void do_layer_norm(Rows<const float> x, const float* weight, const float* bias, float eps,
                     Rows<float> out) override {
    cuda::layer_norm(stream(), x, weight, bias, eps, out);
  }
  void do_linear(Rows<const float> x, const Matrix& w, Rows<float> out) override {
    const Product product[] = {{w, nullptr, out}};
    do_linears(x, product);
  }
  // One launch for all matrices of a kind of tiles, one each for the others.
  void do_linears(Rows<const float> x, std::span<const Product> products) override {
    std::vector<cuda::TileKind> kinds;
    for (const Product& p : products) {
      const Matrix& w = p.weight;
      if (!w.tiled) {
        cuda::grouped_linear(stream(), w.format,
                             {.single = cuda::device_matrix(w, p.bias), .x = x, .out = p.out}, 1, w.n, w.k,
                             x.rows);
        if (p.add_to.data != nullptr) cuda::add(stream(), p.out, p.add_to);
      } else if (std::find(kinds.begin(), kinds.end(), cuda::tile_kind(w)) == kinds.end()) {
        kinds.push_back(cuda::tile_kind(w));
      }
    }
    for (cuda::TileKind kind : kinds) tile_linear(kind, {.x = x.data, .x_stride = x.stride}, x, products);
  }
  void do_norm_linears(Rows<const float> x, const float* weight, float eps, Rows<float> normed,
                       std::span<const Product> products) override {
    if (x.data == normed.data || !can_prepare(x, products))
      return Ops::do_norm_linears(x, weight, eps, normed, products);
    tile_linear(cuda::tile_kind(products[0].weight),
                {.x = x.data,
                 .x_stride = x.stride,
                 .prepare = cuda::Prepare::kNorm,
                 .norm = weight,
                 .eps = eps,
                 .normed = normed.data,
                 .normed_stride = normed.stride},
                x, products);
  }
  void do_glu_linear(const ActivationSpec& spec, Rows<float> gate, Rows<const float> up,
                     const Product& product) override {
    if (!can_prepare(gate, {&product, 1})) return Ops::do_glu_linear(spec, gate, up, product);
    tile_linear(cuda::tile_kind(product.weight),
                {.x = gate.data,
                 .x_stride = gate.stride,
                 .prepare = cuda::Prepare::kGlu,
                 .activation = spec,
                 .up = up.data,
                 .up_stride = up.stride},
                gate, {&product, 1});
  }
  void do_linear_heads(Rows<const float> x, int64_t x_head, std::span<const Matrix> w_H, Rows<float> out,
                       int64_t out_head) override {
    if (std::ranges::any_of(w_H, [](const Matrix& w) { return w.tiled; })) {
      return Ops::do_linear_heads(x, x_head, w_H, out, out_head);
    }
    const MatrixTable& table = table_of(w_H);
    int64_t n = 0;
    for (const Matrix& w : w_H) n = std::max(n, w.n);
    for (MatrixFormat format : table.formats) {
      cuda::grouped_linear(stream(), format,
                           {.table = table.device.as<DeviceMatrix>(),
                            .x = x,
                            .out = out,
                            .x_step = x_head,
                            .out_step = out_head},
                           std::ssize(w_H), n, w_H[0].k, x.rows);
    }
  }
  void do_rope_table(const int32_t* positions_T, std::span<const float> inv_freq, float factor,
                     Rows<float> out) override {
    cuda::rope_table(stream(), positions_T, inv_freq.data(), factor, out);
  }
  void do_rope(Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style,
               int64_t offset) override {
    cuda::rope(stream(), x, head_dim, table, style, offset);
  }
  void do_write_kv(Rows<const float> k, Rows<const float> v, const RowsOfStep& rows,
                   const KvView& kv) override {
    cuda::write_kv(stream(), k, v, rows, kv);
  }
  void do_prepare_attend(const PrepareAttendArgs& args) override { cuda::prepare_attend(stream(), args); }
  void do_attend(const AttendArgs& args) override { attend_to(args, nullptr, nullptr); }
  void do_prepare_and_attend(const PrepareAttendArgs& prepare, const AttendArgs& args) override {
    if (!args.rows.one_a_sequence) return Ops::do_prepare_and_attend(prepare, args);
    attend_to(args, nullptr, &prepare);
  }
  void do_attend_selected(const AttendArgs& args, const Selection& selection) override {
    attend_to(args, &selection, nullptr);
  }
  void do_index_select(const IndexSelectArgs& args) override {
    auto* scores = scratch<uint32_t>(cuda::index_select_scratch(args), "index_select: scores");
    cuda::index_select(stream(), args, scores);
  }
  void do_causal_conv(const CausalConvArgs& args) override { cuda::causal_conv(stream(), args); }
  void do_kda(const KdaArgs& args) override { cuda::kda(stream(), args); }
  void do_gate_output(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<float> x) override {
    cuda::gate_output(stream(), kind, gate, head_dim, x);
  }
  void do_activate(const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up,
                   Rows<float> out) override {
    cuda::activate(stream(), spec, gate, up, out);
  }
  void do_add(Rows<const float> y, Rows<float> x) override { cuda::add(stream(), y, x); }
  void do_add_bias(Rows<float> x, const float* bias) override { cuda::add_bias(stream(), x, bias); }
  void do_copy(Rows<const float> x, Rows<float> out) override { cuda::copy(stream(), x, out); }
  void do_hyper_weights(const HyperSpec& spec, const float* base, const float* scale,
                        Rows<float> mix) override {
    cuda::hyper_weights(stream(), spec, base, scale, mix);
  }
  void do_hyper_collect(const HyperSpec& spec, Rows<const float> streams, Rows<const float> mix,
                        Rows<float> out) override {
    cuda::hyper_collect(stream(), spec, streams, mix, out);
  }
  void do_hyper_distribute(const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                           Rows<float> streams) override {
    cuda::hyper_distribute(stream(), spec, y, mix, streams);
  }
  void do_hyper_mean(const HyperSpec& spec, Rows<const float> streams, Rows<float> out) override {
    cuda::hyper_mean(stream(), spec, streams, out);
  }
  void do_top_logits(Rows<const float> logits_TV, Rows<TokenLogit> out) override {
    auto* keys =
        scratch<uint64_t>(cuda::top_logits_scratch(logits_TV.rows, logits_TV.cols), "top_logits: keys");
    cuda::top_logits(stream(), logits_TV, out, keys);
  }
  void do_route(const RouteArgs& args) override { cuda::route(stream(), args); }

  void do_routed_ffn(const RouteArgs& route, const ExpertFfnArgs& args, const SharedExpert* shared) override {
    const auto& experts = static_cast<const CudaExperts&>(args.experts);
    if (!experts.tensor || args.ids.rows == 0) return Ops::do_routed_ffn(route, args, shared);
    constexpr int64_t kActivatedBeside = 4;  // rows: then it is an element a lane
    const bool alone =
        shared == nullptr || cuda::uses_many(paths_.choose(*experts.tensor, args.ids.cols), args.ids.rows);
    const bool joins =
        !alone && shared->down.tiled && cuda::can_join_experts(cuda::tile_kind(shared->down), args.ids.rows);
    const bool activates = !alone && !joins && args.ids.rows <= kActivatedBeside;
    packed_expert_ffn(args, experts, &route, joins || activates ? shared : nullptr, joins);
    if (shared == nullptr || joins) return;
    const Product down{shared->down, nullptr, shared->out, args.sum()};
    if (activates) return do_linears(shared->gate, {&down, 1});
    do_glu_linear(args.activation, shared->gate, shared->up, down);
  }
  void do_expert_ffn(const ExpertFfnArgs& args) override {
    const auto& experts = static_cast<const CudaExperts&>(args.experts);
    const ExpertScratch& s = args.scratch;
    const int64_t count = experts.count(), routed = args.ids.rows * args.ids.cols;
    if (routed == 0) return;
    if (experts.tensor) return packed_expert_ffn(args, experts, nullptr, nullptr, false);
    auto* order = scratch<int32_t>(cuda::kWordsOfRoutedRow * routed, "expert_ffn: order of the rows");
    const cuda::Grouping grouping{.begin = experts.begin.as<int32_t>(),
                                  .active = experts.active.as<int32_t>(),
                                  .token = order,
                                  .expert = order + routed,
                                  .row_of = order + 2 * routed};
    auto* row_scale = reinterpret_cast<float*>(order + 3 * routed);  // of W4A4
    cuda::group_by_expert(stream(), args.ids, count, grouping);
    const int64_t groups = std::min(count, routed);
    const bool w4a4 = args.arithmetic.w4a4;
    // x_row as in GroupedLinear.
    auto product = [&](const MatrixTable& table, Rows<const float> x, const int32_t* x_row, Rows<float> out) {
      for (MatrixFormat format : table.formats) {
        cuda::grouped_linear(stream(), format,
                             {.table = table.device.as<DeviceMatrix>(),
                              .active = grouping.active,
                              .begin = grouping.begin,
                              .x_row = x_row,
                              .x_scale = w4a4 ? row_scale : nullptr,
                              .x = x,
                              .out = out},
                             groups, out.cols, x.cols, ceil_div(routed, groups));
      }
    };
    auto round = [&](const MatrixTable& table, Rows<const float> x, const int32_t* x_row, Rows<float> out) {
      cuda::round_rows(stream(), args.arithmetic.act_scale, table.device.as<DeviceMatrix>(), grouping.expert,
                       x, x_row, out, row_scale);
    };
    const Rows<float> gate = s.gate.slice(0, routed), up = s.up.slice(0, routed),
                      down = s.down.slice(0, routed), gathered = s.gathered.slice(0, routed);
    // Rows of x are read where they are, but for those that are rounded for an expert.
    if (w4a4) round(experts.gate, args.x, grouping.token, gathered);
    const Rows<const float> x = w4a4 ? gathered : args.x;
    const int32_t* x_row = w4a4 ? nullptr : grouping.token;
    product(experts.gate, x, x_row, gate);
    product(experts.up, x, x_row, up);
    cuda::activate(stream(), args.activation, gate, up, gate);
    if (w4a4) round(experts.down, gate, nullptr, gate);
    product(experts.down, gate, nullptr, down);
    cuda::combine(stream(), args.weights, down, grouping, args.out);
    if (args.add_to.data != nullptr) cuda::add(stream(), args.out, args.add_to);
  }

 private:
  cudaStream_t stream() const { return stream_.get(); }

  // route null: ids and weights are there. shared null: none, or not here; joins: its product, too.
  void packed_expert_ffn(const ExpertFfnArgs& args, const CudaExperts& experts, const RouteArgs* route,
                         const SharedExpert* shared, bool joins) {
    const cuda::MoeShape shape = paths_.choose(*experts.tensor, args.ids.cols);
    const int tokens = static_cast<int>(args.ids.rows);
    const Rows<float>& out = args.sum();
    cuda::SharedDown shared_down;
    if (shared != nullptr) {
      shared_down = {.tiles = joins ? static_cast<const uint8_t*>(shared->down.codes) : nullptr,
                     .scale = shared->down.tensor_scale,
                     .width = static_cast<int>(shared->down.k),
                     .gate = shared->gate.data,
                     .gate_stride = shared->gate.stride,
                     .up = shared->up.data,
                     .up_stride = shared->up.stride};
    }
    cuda::check(cuda::moe_decode({.shape = shape,
                                  .experts = experts.packed_table.as<cuda::PackedExpert>(),
                                  .activation = args.activation,
                                  .tokens = tokens,
                                  .x = args.x.data,
                                  .x_stride = args.x.stride,
                                  .ids = args.ids.data,
                                  .ids_stride = args.ids.stride,
                                  .weights = args.weights.data,
                                  .weights_stride = args.weights.stride,
                                  .out = out.data,
                                  .out_stride = out.stride,
                                  .adds = args.add_to.data != nullptr,
                                  .shared = shared_down,
                                  .workspace = scratch<char>(cuda::moe_decode_workspace_bytes(shape, tokens),
                                                             "expert_ffn: rows"),
                                  .route = route,
                                  .handed = zeros(cuda::moe_decode_handed(shape, tokens))},
                                 stream()),
                "expert_ffn");
  }

  // The products of `kind` among them, kMaxTileProducts a launch; `launch` says what becomes of x.
  void tile_linear(cuda::TileKind kind, cuda::TileLinear launch, Rows<const float> x,
                   std::span<const Product> products) {
    launch.rows = x.rows;
    launch.k = x.cols;
    launch.workspace = scratch<char>(cuda::tile_linear_workspace_bytes(kind, x.rows, x.cols), "linear: rows");
    auto run = [&] {
      cuda::check(cuda::tile_linear(kind, launch, stream()), "linear");
      launch.count = 0;
    };
    for (const Product& p : products) {
      if (!p.weight.tiled || cuda::tile_kind(p.weight) != kind) continue;
      const bool adds = p.add_to.data != nullptr;
      const Rows<float>& out = adds ? p.add_to : p.out;
      launch.products[launch.count++] = {.tiles = static_cast<const uint8_t*>(p.weight.codes),
                                         .bias = p.bias,
                                         .out = out.data,
                                         .adds = adds,
                                         .out_stride = out.stride,
                                         .n = p.weight.n,
                                         .scale = p.weight.tensor_scale};
      if (launch.count == cuda::kMaxTileProducts) run();
    }
    run();
  }
  // Whether one launch prepares the rows and does all products.
  static bool can_prepare(Rows<const float> x, std::span<const Product> products) {
    if (products.empty() || std::ssize(products) > cuda::kMaxTileProducts) return false;
    if (!products[0].weight.tiled) return false;
    const cuda::TileKind kind = cuda::tile_kind(products[0].weight);
    return std::ranges::all_of(
               products,
               [&](const Product& p) { return p.weight.tiled && cuda::tile_kind(p.weight) == kind; }) &&
           cuda::can_prepare(kind, x.rows, x.cols);
  }

  void attend_to(const AttendArgs& args, const Selection* selection, const PrepareAttendArgs* prepare) {
    if (args.q.rows == 0) return;
    const int64_t a_row = cuda::attend_row_scratch(args, selection);
    const int64_t rows = cuda::attend_rows_at_once(args.q.rows, a_row);
    auto* pieces = scratch<float>(rows * a_row, "attend: pieces");
    cuda::attend(stream(), args, selection, prepare, pieces, rows,
                 zeros(rows * (args.q.cols / args.kv.head_dim)));
  }

  // The table of a layer's heads, made the first time that they come. A placed matrix keeps its address, so
  // the addresses say which heads these are.
  const MatrixTable& table_of(std::span<const Matrix> heads) {
    std::vector<const void*> key;
    for (const Matrix& m : heads) key.push_back(m.codes);
    auto found = head_tables_.find(key);
    if (found == head_tables_.end()) {
      std::vector<DeviceMatrix> matrices;
      for (const Matrix& m : heads) matrices.push_back(cuda::device_matrix(m));
      found = head_tables_.emplace(std::move(key), must(weights_.make_table(matrices))).first;
    }
    return found->second;
  }

  // Working memory of an operation; grows in the first step of a shape and never after.
  template <class T>
  T* scratch(int64_t elements, const char* purpose) {
    grow(scratch_, elements * static_cast<int64_t>(sizeof(T)), purpose);
    return scratch_.as<T>();
  }
  // What multiprocessors tell each other: zero, and kernels leave it so.
  uint32_t* zeros(int64_t words) {
    if (grow(zeros_, words * static_cast<int64_t>(sizeof(uint32_t)), "words that are handed on"))
      cuda::check(cudaMemsetAsync(zeros_.as<void>(), 0, zeros_.bytes(), stream()),
                  "words that are handed on");
    return zeros_.as<uint32_t>();
  }
  // Whether it was too small.
  bool grow(Buffer& buffer, int64_t bytes, const char* purpose) {
    if (bytes <= buffer.bytes()) return false;
    forget_graphs();  // which hold the old address
    buffer = Buffer();
    buffer = must(Buffer::allocate(memory_, bytes, purpose));
    return true;
  }

  // An operation has no way to report that memory is short.
  template <class T>
  static T must(Result<T> result) {
    if (!result.ok()) check_failed(__FILE__, __LINE__, result.status().message().c_str());
    return std::move(result).value();
  }

  void forget_graphs() {
    for (auto& [key, graph] : graphs_) {
      if (graph != nullptr) cuda::check(cudaGraphExecDestroy(graph), "recorded step");
    }
    graphs_.clear();
  }

  cuda::Device device_;
  CudaOptions options_;
  const cuda::MoePaths paths_;
  Stream stream_;
  cuda::CudaMemory memory_{stream_.get()};
  cuda::CudaWeights weights_;
  std::map<std::vector<const void*>, MatrixTable> head_tables_;
  Buffer scratch_;
  Buffer zeros_;
  std::unordered_map<uint64_t, cudaGraphExec_t> graphs_;  // null: came once
};

}  // namespace

Result<std::unique_ptr<Ops>> make_cuda_ops(const CudaOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(cuda::Device device, cuda::find_device());
  NIBBLE_ASSIGN_OR_RETURN(cuda::MoePaths paths, cuda::make_moe_paths(device, cuda::has_wgmma(), options));
  return std::unique_ptr<Ops>(std::make_unique<CudaOps>(std::move(device), options, std::move(paths)));
}

}  // namespace nibble
