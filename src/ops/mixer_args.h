// Arguments of the operations behind recurrent layers, sparse attention and residual streams; the formulas
// are those of spec/models.md 1. Every pointer is in the backend's memory. Rows of one sequence stand in the
// order of their positions.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/dims.h"
#include "ops/kv_view.h"

namespace nibble {

// A causal depthwise convolution and SiLU: out[t, c] = silu(sum_j weight[c, j] * x[t - taps + 1 + j, c]).
struct CausalConvArgs {
  Rows<const float> x;            // [T, C]
  const float* weight = nullptr;  // [C, taps]
  int64_t taps = 0;
  float* state =
      nullptr;  // [slots, taps - 1, C] the last inputs, oldest first; zero at the start of a sequence
  RowsOfStep rows;
  Rows<float> out;  // [T, C]
};

// Kimi delta attention: S = exp(g)[:, None] * S; d = beta * (v - S^T k); S += k d^T; out = S^T q, for each
// head, with q and k normalized to length 1 and q scaled by K^-0.5.
struct KdaArgs {
  Rows<const float> q, k, v;  // [T, H*K]
  Rows<const float> decay;  // [T, H*K]; g = bound * sigmoid(exp(a_log[h]) * (decay + dt_bias)), or without a
                            // bound -exp(a_log[h]) * softplus(decay + dt_bias)
  Rows<const float> beta;   // [T, H], before its sigmoid
  const float* dt_bias = nullptr;  // [H*K]
  const float* a_log = nullptr;    // [H]
  std::optional<float> gate_lower_bound;
  float* state = nullptr;  // [slots, H, K, K] (key, value); zero at the start of a sequence
  RowsOfStep rows;
  Rows<float> out;  // [T, H*K]
};

// The positions that rows of a step attend to, ascending.
struct Selection {
  Rows<int32_t> positions;    // [T, at least top_k + pool - 1]
  int32_t* counts = nullptr;  // [T]
};

// For each row the top_k / pool best complete pools of `pool` tokens, and the tokens of its own incomplete
// pool. Pool key: sum_j softmax_j(gate_j + ape_j) * key_j, channel by channel; score: sum_h weights[h] *
// relu(q_h . pool * K^-0.5); equal scores: the earlier pool.
struct IndexSelectArgs {
  Rows<const float> q;         // [T, H*K]
  Rows<const float> weights;   // [T, H]
  KvView kv;                   // keys, and as values the gates; one head of K
  const float* ape = nullptr;  // [pool, K]
  int64_t pool = 1;
  int64_t top_k = 0;
  RowsOfStep rows;
  Selection out;
};

// Residual streams (hyper-connections), S of them, each of width D.
struct HyperSpec {
  int64_t streams = 0;
  int64_t sinkhorn_iterations = 0;
  float eps = 0;

  int64_t mix_width() const { return 2 * streams + streams * streams; }
};

}  // namespace nibble
