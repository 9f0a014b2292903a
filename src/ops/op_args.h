// Arguments of attention and routing, and the kinds of smaller operations. Plain data, like mixer_args.h: the
// device compiler reads both, and does not get through the formatting library. Every pointer is in the
// backend's memory.
#pragma once

#include <cstdint>

#include "ops/dims.h"
#include "ops/kv_view.h"

namespace nibble {

// An output gate of attention, computed from the layer's normed input.
enum class OutputGate {
  kNone,
  kSoftplusHead,     // softplus(gate_TH), one factor for a head's K outputs
  kSoftplusElement,  // softplus(gate_T(H*K)), one factor an output
  kSigmoidElement,   // sigmoid(gate_T(H*K))
};

// Which pairs of a head's rotated elements RoPE turns.
enum class RopeStyle {
  kHalves,       // (i, i + rotary_dim/2), NeoX
  kInterleaved,  // (2i, 2i + 1), GPT-J and DeepSeek
};

enum class RouterScore {
  kSigmoid,
  kSqrtSoftplus,   // sqrt(softplus(x))
  kSoftmaxAll,     // softmax over all experts' logits
  kSoftmaxChosen,  // chosen by logit; the weights are the softmax over the chosen logits
};

struct RouterSpec {
  RouterScore score = RouterScore::kSigmoid;
  float logit_softcap = 0;  // 0: none; else logit = cap * tanh(logit / cap) before scoring
  bool renormalize = true;  // weights / sum of the chosen; kSoftmaxChosen has sum 1 and ignores it
  float renormalize_epsilon = 0;
  float scale = 1;  // multiplies the weights at last
  // Above 1, the E experts are n_group groups of E / n_group neighbours, and only those of the topk_group
  // best groups can be chosen: by the sum of a group's two best keys (score + bias), equal sums: lower group
  // first.
  int64_t n_group = 1;
  int64_t topk_group = 1;
};

// A token that may come next.
struct TokenLogit {
  float logit;
  int32_t id;
};
inline constexpr int64_t kTopLogits = 64;  // no more of a row are asked for

struct AttendArgs {
  Rows<const float> q;  // [T, H*K]
  KvView kv;            // holds the keys and values of the step's rows already
  RowsOfStep rows;
  int64_t window = 0;  // 0: all positions <= p; else those with p - i < window
  float scale = 1;     // on q . k
  Rows<float> out;     // [T, H*K], or H * value_width()
  // One learned logit a head that joins the softmax's denominator and has no value; null: none.
  const float* sinks_H = nullptr;
  // What the output is multiplied with at last, as gate_output does.
  OutputGate gate_kind = OutputGate::kNone;
  Rows<const float> gate = {};
};

// The way of a step's queries, keys and values into attention.
struct PrepareAttendArgs {
  Rows<float> q;        // [T, H*K], normed and rotated in place
  Rows<float> k;        // [T, G*K], likewise on its way into the cache; what is left here is undefined
  Rows<const float> v;  // [T, G * value_width()]
  // rms_norm's weight of each head; null: no norm.
  const float* q_norm = nullptr;  // [K]
  const float* k_norm = nullptr;  // [K]
  float eps = 0;
  Rows<const float> rope_table;  // [T, rotary_dim] of Ops::rope_table
  RopeStyle rope_style = RopeStyle::kHalves;
  RowsOfStep rows;
  KvView kv;
};

struct RouteArgs {
  Rows<const float> logits;       // [T, E]
  const float* bias_E = nullptr;  // added to the score for choosing only; null: none
  RouterSpec spec;
  Rows<int32_t> ids;    // [T, A] chosen experts, best first; equal scores: lower id first
  Rows<float> weights;  // [T, A]
};

// The second-level scale g of a row in NVFP4 (spec formats.md 4).
enum class ActScale {
  kRow,     // amax of the row / (6 * 448)
  kStatic,  // the expert's input scale; kRow for an expert that has none
  kUnit,    // 1
};

}  // namespace nibble
