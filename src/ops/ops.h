// The operations that a forward pass is made of. One interface, one backend for each kind of device; the
// forward pass (src/model) is written once over it and knows no device.
//
// Every pointer is in the backend's memory() unless its name says host. Activations are float32.
//
// Invariance, for every operation and backend: what comes out for a row (a token, and in attend a sequence's
// position) depends on that row's inputs alone, bit for bit: not on T, on the other rows, or on the chunk.
//
// The public methods check shapes and call the backend's do_ method; a do_ method with a body here is the
// default made of others ("override = default" is its test).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/activation.h"
#include "ops/dims.h"
#include "ops/kv_view.h"
#include "ops/memory.h"
#include "ops/mixer_args.h"
#include "ops/op_args.h"
#include "ops/step_shape.h"
#include "quant/matrix.h"

namespace nibble {

struct ExpertWeights {
  Matrix gate;  // [I, D]
  Matrix up;    // [I, D]
  Matrix down;  // [D, I]
  // Added to the products; null: none.
  const float* gate_bias = nullptr;  // [I]
  const float* up_bias = nullptr;    // [I]
  const float* down_bias = nullptr;  // [D]
  // What calibration says of the rows that go into gate and up, and into down: ActScale::kStatic; 0: nothing.
  float input_scale = 0, down_input_scale = 0;
};

// Whose experts are placed: a model's, or those of a self-test, which wants every format, and whatever
// kernels the backend has for it: an option that asks for some kernels alone refuses none, and no warning is
// due.
enum class ExpertsOf { kModel, kSelfTest };

// The arithmetic of routed experts (spec moe.md 2). W4A16: rows as they are. W4A4: rows in NVFP4 into both
// products, exact products, float32 sums; g and the tensor scale are multiplied on the sums.
struct ExpertArithmetic {
  bool w4a4 = false;
  ActScale act_scale = ActScale::kRow;  // of W4A4
};

// The routed experts of one layer as a backend holds them.
class PlacedExperts {
 public:
  explicit PlacedExperts(std::vector<ExpertWeights> experts) : experts_(std::move(experts)) {}
  virtual ~PlacedExperts() = default;
  PlacedExperts(const PlacedExperts&) = delete;
  PlacedExperts& operator=(const PlacedExperts&) = delete;

  // [E], at least one, all of the same shapes. A backend that repacks them may leave `codes` and `scales`
  // null.
  std::span<const ExpertWeights> experts() const { return experts_; }
  int64_t count() const { return static_cast<int64_t>(experts_.size()); }
  int64_t model_width() const { return experts_[0].gate.k; }
  int64_t expert_width() const { return experts_[0].gate.n; }

 private:
  std::vector<ExpertWeights> experts_;
};

// Working memory of expert_ffn for R = T * A rows.
struct ExpertScratch {
  Rows<float> gathered;  // [R, D]
  Rows<float> gate;      // [R, I]
  Rows<float> up;        // [R, I]
  Rows<float> down;      // [R, D]
};

struct ExpertFfnArgs {
  Rows<const float> x;           // [T, D]
  Rows<const int32_t> ids;       // [T, A], each in [0, E)
  Rows<const float> weights;     // [T, A]
  const PlacedExperts& experts;  // of place_experts()
  ActivationSpec activation;
  ExpertScratch scratch;
  Rows<float> out;  // [T, D], overwritten
  ExpertArithmetic arithmetic = {};
  Rows<float> add_to = {};  // as in Product

  const Rows<float>& sum() const { return add_to.data != nullptr ? add_to : out; }
};

// What a matrix is placed for: products; those of SharedExpert::down; or (also) embed.
enum class MatrixUse { kProducts, kSharedDown, kEmbedding };

struct Product {
  const Matrix& weight;
  const float* bias = nullptr;  // [N]; null: none
  Rows<float> out;
  // Null: out is overwritten. Else the product is added to this, which is no input of it, and out is room
  // that may be used.
  Rows<float> add_to = {};
};

// An expert that every row goes through, from the products of its gate and up on.
struct SharedExpert {
  Rows<float> gate;      // [T, W], room that may be used
  Rows<const float> up;  // [T, W]
  const Matrix& down;    // [D, W]
  Rows<float> out;       // [T, D], room
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual std::string_view name() const = 0;
  virtual Memory& memory() = 0;
  // One line for people: threads and instruction set, or device and driver.
  virtual std::string description() const = 0;
  // What it computes with on this machine, and why: lines for people.
  virtual std::vector<std::string> choices() const { return {}; }
  // Most bytes of memory() that operations take for themselves in steps up to this one, beside their
  // arguments.
  virtual int64_t working_bytes(const StepShape& /*largest*/) const { return 0; }
  // Whether the bytes of matrices of this format that were placed for products are no longer needed behind
  // place() and place_experts().
  virtual bool copies_weights(MatrixFormat /*format*/) const { return false; }
  // For a model that is larger than memory: from here on place() and place_experts() copy no weights, but
  // keep pointing to the host bytes, however slow products with them are, and copies_weights() is false.
  // Returns whether this backend can.
  virtual bool use_host_weights() { return false; }
  // The same for those in BF16 alone, with which products are nearly as fast.
  virtual bool use_host_bf16() { return false; }
  // Bytes a second that this backend's processors read from memory, in sequence and with all of them: the
  // ceiling of what reads each weight once. Measures it now, on memory far beyond the caches, which takes
  // a few 100 ms.
  virtual Result<double> read_bandwidth() = 0;
  // Whether expert_ffn does W4A4; where not, the loader refuses it.
  virtual bool does_w4a4() const { return true; }

  // Whether products round activations, because an option asked for speed: BackendOptions::cpu_activations.
  virtual bool rounds_activations() const { return false; }

  // Runs `work`, or what was recorded of it: work that came before with this key called the same operations
  // with the same shapes and addresses, whatever those hold now. Only operations, no copies.
  virtual void repeat(uint64_t key, const std::function<void()>& work) { work(); }

  // Brings a weight (in host memory that outlives the backend) into the form and memory in which the other
  // methods take it. May keep pointing to the host bytes.
  virtual Result<Matrix> place(const Matrix& host_matrix, MatrixUse use = MatrixUse::kProducts) = 0;
  // The same for the experts [E] of a layer together. Matrices are in host memory that outlives the backend,
  // biases in memory() already. REQUIRES at least one expert, and the same shapes of all.
  Result<std::unique_ptr<PlacedExperts>> place_experts(std::span<const ExpertWeights> host_experts,
                                                       ExpertsOf whose = ExpertsOf::kModel);

  // out[t] = table[ids[t]]. REQUIRES every id in [0, V).
  void embed(std::span<const int32_t> ids_T, const Matrix& table_VD, Rows<float> out_TD);
  // out[i] = x[indices[i]]. REQUIRES every index in [0, rows of x).
  void gather(Rows<const float> x, std::span<const int32_t> indices, Rows<float> out);
  // out = x * rsqrt(mean(x^2) + eps) * weight, over each row. out may be x.
  void rms_norm(Rows<const float> x, const float* weight, float eps, Rows<float> out);
  // out = x W^T: [R, K] x [N, K]^T -> [R, N].
  void linear(Rows<const float> x, const Matrix& w, Rows<float> out);
  // The same without what rounds_activations() says, for comparing.
  void exact_linear(Rows<const float> x, const Matrix& w, Rows<float> out);
  // linear of the same rows with several matrices, and a bias where there is one.
  void linears(Rows<const float> x, std::span<const Product> products);
  // normed = rms_norm of x, and linears of it. normed may be x.
  void norm_linears(Rows<const float> x, const float* weight, float eps, Rows<float> normed,
                    std::span<const Product> products);
  // The product of activate(gate, up), for which gate is room that may be used.
  void glu_linear(const ActivationSpec& spec, Rows<float> gate, Rows<const float> up, const Product& product);
  // cos and sin of position * inv_freq, times `factor`: [T, rotary_dim], the cosines then the sines.
  void rope_table(const int32_t* positions_T, std::span<const float> inv_freq, float factor, Rows<float> out);
  // Rotates the rotary_dim elements from `offset` of each head of x [T, heads * head_dim] in place, with the
  // rows of rope_table.
  void rope(Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style = RopeStyle::kHalves,
            int64_t offset = 0);
  // Puts k [T, G*K] and v [T, G * value_width()] where the page table says.
  void write_kv(Rows<const float> k, Rows<const float> v, const RowsOfStep& rows, const KvView& kv);
  // rms_norm of the heads of q and k, rope of them from their first element, write_kv.
  void prepare_attend(const PrepareAttendArgs& args);
  // out[t, h] = softmax(scale * q[t, h] . k[i, h*G/H]) v[i], over the visible positions i (and the sink).
  void attend(const AttendArgs& args);
  // Both, one after the other. REQUIRES that positions, slots, page tables and what the cache has of earlier
  // positions were there before the operation before this one began: they come by copies, before a step.
  void prepare_and_attend(const PrepareAttendArgs& prepare, const AttendArgs& args);
  // attend over chosen positions alone; args.window is not used. REQUIRES no sinks and no gate.
  void attend_selected(const AttendArgs& args, const Selection& selection);
  void index_select(const IndexSelectArgs& args);
  void causal_conv(const CausalConvArgs& args);
  void kda(const KdaArgs& args);
  // x[t, h, :] *= softplus or sigmoid of the gate.
  void gate_output(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<float> x);
  // out = activation(gate, up), elementwise. out may be gate.
  void activate(const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up, Rows<float> out);
  // x += y.
  void add(Rows<const float> y, Rows<float> x);
  // x[t] += bias, for each row.
  void add_bias(Rows<float> x, const float* bias);
  // out = x; both may be columns of wider matrices.
  void copy(Rows<const float> x, Rows<float> out);
  // out = (x - mean) * rsqrt(variance + eps) * weight + bias, over each row. out may be x.
  void layer_norm(Rows<const float> x, const float* weight, const float* bias, float eps, Rows<float> out);
  // linear for each head: head h of x (elements h * x_head .. of a row) times w_H[h] to head h of out.
  void linear_heads(Rows<const float> x, int64_t x_head, std::span<const Matrix> w_H, Rows<float> out,
                    int64_t out_head);
  // The out.cols largest of each row, largest first; of equal ones the lower id first; NaN before all.
  // REQUIRES 1 <= out.cols <= min(kTopLogits, V), V < 2^28.
  void top_logits(Rows<const float> logits_TV, Rows<TokenLogit> out);
  // From the mix [T, 2S + S*S] of a sublayer: pre [S], post [S], comb [S, S] (Sinkhorn-normalized) in place.
  void hyper_weights(const HyperSpec& spec, const float* base, const float* scale, Rows<float> mix);
  // out = sum_i pre_i * stream_i.
  void hyper_collect(const HyperSpec& spec, Rows<const float> streams, Rows<const float> mix,
                     Rows<float> out);
  // stream_i = post_i * y + sum_j comb[j, i] * stream_j.
  void hyper_distribute(const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                        Rows<float> streams);
  // out = mean of the streams.
  void hyper_mean(const HyperSpec& spec, Rows<const float> streams, Rows<float> out);
  void route(const RouteArgs& args);
  // route, and expert_ffn of what it chose; behind it the shared expert (null: none) by glu_linear, added to
  // the same sum. REQUIRES the ids and weights of both to be the same.
  void routed_ffn(const RouteArgs& route, const ExpertFfnArgs& args, const SharedExpert* shared = nullptr);
  // out[t] = sum over a of weights[t, a] * down(activation(gate(x[t]), up(x[t]))) of expert ids[t, a], added
  // in the order of a. The experts' matrices may be of any formats.
  void expert_ffn(const ExpertFfnArgs& args);

 protected:
  // Default: each matrix by place().
  virtual Result<std::unique_ptr<PlacedExperts>> do_place_experts(std::span<const ExpertWeights> host_experts,
                                                                  ExpertsOf whose);
  virtual void do_embed(std::span<const int32_t> ids_T, const Matrix& table_VD, Rows<float> out_TD) = 0;
  virtual void do_gather(Rows<const float> x, std::span<const int32_t> indices, Rows<float> out) = 0;
  virtual void do_rms_norm(Rows<const float> x, const float* weight, float eps, Rows<float> out) = 0;
  virtual void do_linear(Rows<const float> x, const Matrix& w, Rows<float> out) = 0;
  virtual void do_rope_table(const int32_t* positions_T, std::span<const float> inv_freq, float factor,
                             Rows<float> out) = 0;
  virtual void do_rope(Rows<float> x, int64_t head_dim, Rows<const float> table, RopeStyle style,
                       int64_t offset) = 0;
  virtual void do_write_kv(Rows<const float> k, Rows<const float> v, const RowsOfStep& rows,
                           const KvView& kv) = 0;
  virtual void do_attend(const AttendArgs& args) = 0;
  virtual void do_gate_output(OutputGate kind, Rows<const float> gate, int64_t head_dim, Rows<float> x) = 0;
  virtual void do_activate(const ActivationSpec& spec, Rows<const float> gate, Rows<const float> up,
                           Rows<float> out) = 0;
  virtual void do_add(Rows<const float> y, Rows<float> x) = 0;
  virtual void do_add_bias(Rows<float> x, const float* bias) = 0;
  virtual void do_route(const RouteArgs& args) = 0;
  // Default: linear.
  virtual void do_exact_linear(Rows<const float> x, const Matrix& w, Rows<float> out);
  // Default in host_top_logits.cc; REQUIRES that host code can read the backend's memory.
  virtual void do_top_logits(Rows<const float> logits_TV, Rows<TokenLogit> out);
  // Defaults in plain loops (host_mixers.cc); REQUIRE that host code can read the backend's memory.
  virtual void do_attend_selected(const AttendArgs& args, const Selection& selection);
  virtual void do_index_select(const IndexSelectArgs& args);
  virtual void do_causal_conv(const CausalConvArgs& args);
  virtual void do_kda(const KdaArgs& args);
  virtual void do_copy(Rows<const float> x, Rows<float> out);
  virtual void do_layer_norm(Rows<const float> x, const float* weight, const float* bias, float eps,
                             Rows<float> out);
  virtual void do_hyper_weights(const HyperSpec& spec, const float* base, const float* scale,
                                Rows<float> mix);
  virtual void do_hyper_collect(const HyperSpec& spec, Rows<const float> streams, Rows<const float> mix,
                                Rows<float> out);
  virtual void do_hyper_distribute(const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                                   Rows<float> streams);
  virtual void do_hyper_mean(const HyperSpec& spec, Rows<const float> streams, Rows<float> out);
  // Default: one linear, add_bias and add after the other.
  virtual void do_linears(Rows<const float> x, std::span<const Product> products);
  // Default: rms_norm, linears.
  virtual void do_norm_linears(Rows<const float> x, const float* weight, float eps, Rows<float> normed,
                               std::span<const Product> products);
  // Default: activate, linears.
  virtual void do_glu_linear(const ActivationSpec& spec, Rows<float> gate, Rows<const float> up,
                             const Product& product);
  // Default: rms_norm, rope, write_kv.
  virtual void do_prepare_attend(const PrepareAttendArgs& args);
  // Default: prepare_attend, attend.
  virtual void do_prepare_and_attend(const PrepareAttendArgs& prepare, const AttendArgs& args);
  // Default: one linear a head.
  virtual void do_linear_heads(Rows<const float> x, int64_t x_head, std::span<const Matrix> w_H,
                               Rows<float> out, int64_t out_head);
  // Default: route, expert_ffn, glu_linear.
  virtual void do_routed_ffn(const RouteArgs& route, const ExpertFfnArgs& args, const SharedExpert* shared);
  // Default: group rows by expert on the host, gather, three linears an expert, combine. REQUIRES that host
  // code can read the backend's memory.
  virtual void do_expert_ffn(const ExpertFfnArgs& args);

 private:
  void check_expert_ffn(const ExpertFfnArgs& args) const;
};

}  // namespace nibble
