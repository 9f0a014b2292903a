// The weights of a model, placed in a backend's memory, and their loading from the files of a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "base/result.h"
#include "checkpoint/weight_source.h"
#include "model/spec.h"
#include "ops/memory.h"
#include "ops/ops.h"

namespace nibble {

struct GqaWeights {
  Matrix query, key, value, output;  // [H*K, D], [G*K, D], [G*K, D], [D, H*K]
  Matrix output_gate;                // [gate_width, D]; empty without a gate
  // Null where the model has none.
  const float *query_bias = nullptr, *key_bias = nullptr, *value_bias = nullptr, *output_bias = nullptr;
  const float *query_norm = nullptr, *key_norm = nullptr;
  const float* sinks = nullptr;  // [H]
};

struct IndexerWeights {
  Matrix query;                                               // [heads * dim, q_rank]
  Matrix key;                                                 // [dim, D]
  Matrix gate;                                                // [dim, D]
  Matrix head_weights;                                        // [heads, D]
  const float *key_norm = nullptr, *key_norm_bias = nullptr;  // [dim]
  const float* ape = nullptr;                                 // [pool, dim]
};

struct MlaWeights {
  Matrix query_down;                 // [q_rank, D]; empty where q_rank is 0
  Matrix query_up;                   // [H * (nope + rope), q_rank or D]
  Matrix latent;                     // [kv_rank + rope, D]
  Matrix output;                     // [D, H * value_dim]
  std::vector<Matrix> key_absorb_H;  // [kv_rank, nope], the transpose of kv_b's key rows of a head
  std::vector<Matrix> value_up_H;    // [value_dim, kv_rank]
  const float *query_norm = nullptr, *latent_norm = nullptr;
  IndexerWeights indexer;
};

struct KdaWeights {
  Matrix query, key, value, output;                                               // [H*K, D], output [D, H*K]
  Matrix decay_down, decay_up;                                                    // [K, D], [H*K, K]
  Matrix gate_down, gate_up;                                                      // the same
  Matrix beta;                                                                    // [H, D]
  const float *query_conv = nullptr, *key_conv = nullptr, *value_conv = nullptr;  // [H*K, taps]
  const float *dt_bias = nullptr, *a_log = nullptr, *output_norm = nullptr;       // [H*K], [H], [K]
};

using MixerWeights = std::variant<GqaWeights, MlaWeights, KdaWeights>;

// Of one sublayer's hyper-connection.
struct HyperWeights {
  Matrix mix;                    // [2S + S*S, S*D]
  const float* base = nullptr;   // [2S + S*S]
  const float* scale = nullptr;  // [3]
};

struct FfnWeights {
  ExpertWeights dense;                       // of a dense layer
  Matrix router;                             // [E, D]
  const float* router_bias = nullptr;        // [E], for choosing only; null: none on disk
  const float* router_logit_bias = nullptr;  // [E], null: none
  std::unique_ptr<PlacedExperts> experts;    // null in a dense layer
  ExpertWeights shared;                      // empty without a shared expert
};

struct LayerWeights {
  const float* input_norm = nullptr;  // [D]
  const float* ffn_norm = nullptr;    // [D]
  MixerWeights mixer;
  FfnWeights ffn;
  HyperWeights mixer_hyper, ffn_hyper;
};

struct ModelWeights {
  Matrix embedding;  // [V, D]
  Matrix head;       // [V, D]; the embedding again where tied
  const float* final_norm = nullptr;
  std::vector<LayerWeights> layers;
  std::vector<std::span<const float>> rope_inv_freq;  // one a ModelSpec::ropes
  const float* ones = nullptr;                        // [residual width], the weight of a norm without one
  std::vector<Buffer> vectors;                        // what the float pointers point into
  std::vector<std::vector<std::byte>> host_matrices;  // matrices made at load, as they were on the host
};

// Called after each layer with the bytes of the source that have been loaded so far.
using LoadProgress = std::function<void(int64_t loaded_bytes, int64_t total_bytes)>;

// Loads every tensor that `spec` names; what the source holds beyond that (and is not known to be harmless)
// is an error that names it. Matrices may go on pointing into the source, which must outlive the weights.
// Experts that the arithmetic cannot take (W4A4: other formats than NVFP4) are an error that names them.
Result<ModelWeights> load_weights(const ModelSpec& spec, WeightSource& source, Ops& ops,
                                  const ExpertArithmetic& arithmetic = {}, const LoadProgress& progress = {});

// Bytes of weights that a step reads: all matrices once, of the routed experts of layer i `experts[i]` (of a
// dense layer 0), of the embedding a row for each of `rows`, and the head where logits are wanted.
int64_t weight_bytes_of_step(const ModelSpec& spec, const ModelWeights& weights, int64_t rows,
                             std::span<const int64_t> experts, bool logits);
// The same of a decode step of one token: what it costs at least in memory traffic.
int64_t weight_bytes_per_token(const ModelSpec& spec, const ModelWeights& weights);

}  // namespace nibble
