#include "ops/cuda/cuda_ops.h"

#include <algorithm>
#include <map>
#include <vector>

#include "base/numbers.h"
#include "ops/cuda/cuda_memory.h"
#include "ops/cuda/device.h"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"

namespace nibble {
namespace {

using cuda::DeviceMatrix;
using cuda::GroupedLinear;

constexpr int64_t kAlign = 256;  // of a matrix's codes and scales; a memory transaction and more

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

// Which formats some matrices have: a launch does those of one.
std::vector<MatrixFormat> formats_of(const std::vector<DeviceMatrix>& matrices) {
  std::vector<MatrixFormat> formats;
  for (const DeviceMatrix& m : matrices) {
    if (std::find(formats.begin(), formats.end(), m.format) == formats.end()) formats.push_back(m.format);
  }
  return formats;
}

// Matrices in a table on the device.
struct MatrixTable {
  Buffer device;  // DeviceMatrix each
  std::vector<MatrixFormat> formats;
};

class CudaExperts final : public PlacedExperts {
 public:
  explicit CudaExperts(std::vector<ExpertWeights> experts) : PlacedExperts(std::move(experts)) {}

  MatrixTable gate, up, down;
  Buffer begin, active;  // of a cuda::Grouping, of the step that runs
};

class CudaOps final : public Ops {
 public:
  explicit CudaOps(cuda::Device device) : device_(std::move(device)) {}

  std::string_view name() const override { return "cuda"; }
  Memory& memory() override { return memory_; }
  std::string description() const override { return "cuda (" + device_.describe() + ")"; }

  Result<Matrix> place(const Matrix& host_matrix) override {
    Matrix placed = host_matrix;
    NIBBLE_RETURN_IF_ERROR(place_all({&placed}));
    return placed;
  }

 protected:
  Result<std::unique_ptr<PlacedExperts>> do_place_experts(
      std::span<const ExpertWeights> host_experts) override {
    std::vector<ExpertWeights> experts(host_experts.begin(), host_experts.end());
    std::vector<Matrix*> matrices;
    for (ExpertWeights& e : experts) matrices.insert(matrices.end(), {&e.gate, &e.up, &e.down});
    NIBBLE_RETURN_IF_ERROR(place_all(matrices));
    auto placed = std::make_unique<CudaExperts>(std::move(experts));
    auto table = [&](Matrix ExpertWeights::*matrix, const float* ExpertWeights::*bias) {
      std::vector<DeviceMatrix> of_expert;
      for (const ExpertWeights& e : placed->experts())
        of_expert.push_back(cuda::device_matrix(e.*matrix, e.*bias));
      return make_table(of_expert);
    };
    NIBBLE_ASSIGN_OR_RETURN(placed->gate, table(&ExpertWeights::gate, &ExpertWeights::gate_bias));
    NIBBLE_ASSIGN_OR_RETURN(placed->up, table(&ExpertWeights::up, &ExpertWeights::up_bias));
    NIBBLE_ASSIGN_OR_RETURN(placed->down, table(&ExpertWeights::down, &ExpertWeights::down_bias));
    const int64_t bytes = (placed->count() + 1) * static_cast<int64_t>(sizeof(int32_t));
    NIBBLE_ASSIGN_OR_RETURN(placed->begin, Buffer::allocate(memory_, bytes, "expert groups"));
    NIBBLE_ASSIGN_OR_RETURN(placed->active, Buffer::allocate(memory_, bytes, "expert groups"));
    return std::unique_ptr<PlacedExperts>(std::move(placed));
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
    cuda::grouped_linear(stream(), w.format, {.single = cuda::device_matrix(w), .x = x, .out = out}, 1, w.n,
                         w.k, x.rows);
  }
  void do_linear_heads(Rows<const float> x, int64_t x_head, std::span<const Matrix> w_H, Rows<float> out,
                       int64_t out_head) override {
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
  void do_attend(const AttendArgs& args) override { attend_to(args, nullptr); }
  void do_attend_selected(const AttendArgs& args, const Selection& selection) override {
    attend_to(args, &selection);
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
  void do_route(const RouteArgs& args) override { cuda::route(stream(), args); }

  void do_expert_ffn(const ExpertFfnArgs& args) override {
    const auto& experts = static_cast<const CudaExperts&>(args.experts);
    const ExpertScratch& s = args.scratch;
    const int64_t count = experts.count(), routed = args.ids.rows * args.ids.cols;
    if (routed == 0) return;
    // The rows of x are read where they are; what would hold them holds their order, two numbers a row.
    NIBBLE_CHECK(s.gathered.cols >= 2);
    auto* order = reinterpret_cast<int32_t*>(s.gathered.data);
    const cuda::Grouping grouping{.begin = experts.begin.as<int32_t>(),
                                  .active = experts.active.as<int32_t>(),
                                  .token = order,
                                  .row_of = order + 1,
                                  .stride = s.gathered.stride};
    cuda::group_by_expert(stream(), args.ids, count, grouping);
    const int64_t groups = std::min(count, routed);
    auto product = [&](const MatrixTable& table, Rows<const float> x, bool gathers, Rows<float> out) {
      for (MatrixFormat format : table.formats) {
        cuda::grouped_linear(stream(), format,
                             {.table = table.device.as<DeviceMatrix>(),
                              .active = grouping.active,
                              .begin = grouping.begin,
                              .x_row = gathers ? grouping.token : nullptr,
                              .x_row_stride = grouping.stride,
                              .x = x,
                              .out = out},
                             groups, out.cols, x.cols, ceil_div(routed, groups));
      }
    };
    const Rows<float> gate = s.gate.slice(0, routed), up = s.up.slice(0, routed),
                      down = s.down.slice(0, routed);
    product(experts.gate, args.x, true, gate);
    product(experts.up, args.x, true, up);
    cuda::activate(stream(), args.activation, gate, up, gate);
    product(experts.down, gate, false, down);
    cuda::combine(stream(), args.weights, down, grouping, args.out);
  }

 private:
  cudaStream_t stream() const { return stream_.get(); }

  void attend_to(const AttendArgs& args, const Selection* selection) {
    if (args.q.rows == 0) return;
    constexpr int64_t kMostAtOnce = INT64_C(1) << 26;  // floats, where a row needs no more
    const int64_t a_row = cuda::attend_row_scratch(args, selection);
    const int64_t rows = std::clamp<int64_t>(kMostAtOnce / a_row, 1, args.q.rows);
    cuda::attend(stream(), args, selection, scratch<float>(rows * a_row, "attend: pieces"), rows);
  }

  // Brings the host bytes of matrices to the device, in one allocation that lives as long as the backend.
  Status place_all(const std::vector<Matrix*>& matrices) {
    auto code_bytes = [](const Matrix& m) { return matrix_code_bytes(m.format, m.n, m.k); };
    auto scale_bytes = [](const Matrix& m) { return matrix_scale_bytes(m.format, m.n, m.k); };
    int64_t bytes = 0;
    for (const Matrix* m : matrices)
      bytes += round_up(code_bytes(*m), kAlign) + round_up(scale_bytes(*m), kAlign);
    NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(memory_, bytes, "weights"));
    auto* next = buffer.as<uint8_t>();
    auto upload = [&](const void*& data, int64_t size) {
      memory_.upload(next, data, size);
      data = next;
      next += round_up(size, kAlign);
    };
    for (Matrix* m : matrices) {
      upload(m->codes, code_bytes(*m));
      if (scale_bytes(*m) > 0) upload(m->scales, scale_bytes(*m));
    }
    weights_.push_back(std::move(buffer));
    return {};
  }

  Result<MatrixTable> make_table(const std::vector<DeviceMatrix>& matrices) {
    const auto bytes = static_cast<int64_t>(matrices.size() * sizeof(DeviceMatrix));
    MatrixTable table;
    NIBBLE_ASSIGN_OR_RETURN(table.device, Buffer::allocate(memory_, bytes, "table of weights"));
    memory_.upload(table.device.as<void>(), matrices.data(), bytes);
    table.formats = formats_of(matrices);
    return table;
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
      found = head_tables_.emplace(std::move(key), must(make_table(matrices))).first;
    }
    return found->second;
  }

  // Working memory of an operation; grows in the first step of a shape and never after.
  template <class T>
  T* scratch(int64_t elements, const char* purpose) {
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(T));
    if (bytes > scratch_.bytes()) {
      scratch_ = Buffer();
      scratch_ = must(Buffer::allocate(memory_, bytes, purpose));
    }
    return scratch_.as<T>();
  }

  // An operation has no way to report that memory is short.
  template <class T>
  static T must(Result<T> result) {
    if (!result.ok()) check_failed(__FILE__, __LINE__, result.status().message().c_str());
    return std::move(result).value();
  }

  cuda::Device device_;
  Stream stream_;
  cuda::CudaMemory memory_{stream_.get()};
  std::vector<Buffer> weights_;
  std::map<std::vector<const void*>, MatrixTable> head_tables_;
  Buffer scratch_;
};

}  // namespace

Result<std::unique_ptr<Ops>> make_cuda_ops() {
  NIBBLE_ASSIGN_OR_RETURN(cuda::Device device, cuda::find_device());
  return std::unique_ptr<Ops>(std::make_unique<CudaOps>(std::move(device)));
}

}  // namespace nibble
