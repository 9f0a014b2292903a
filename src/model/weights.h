// The weights of a model, placed in a backend's memory, and their loading from a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/result.h"
#include "checkpoint/checkpoint.h"
#include "model/spec.h"
#include "ops/memory.h"
#include "ops/ops.h"

namespace nibble {

struct AttentionWeights {
  Matrix query, key, value, output;   // [H*K, D], [G*K, D], [G*K, D], [D, H*K]
  Matrix output_gate;                 // [gate_width, D]; empty without a gate
  const float* query_norm = nullptr;  // [K]
  const float* key_norm = nullptr;    // [K]
};

struct FfnWeights {
  ExpertWeights dense;                 // of a dense layer
  Matrix router;                       // [E, D]
  const float* router_bias = nullptr;  // [E], for choosing only; null: none on disk
  std::vector<ExpertWeights> experts;  // [E]
  ExpertWeights shared;                // empty without a shared expert
};

struct LayerWeights {
  const float* input_norm = nullptr;  // [D]
  const float* ffn_norm = nullptr;    // [D]
  AttentionWeights attention;
  FfnWeights ffn;
};

struct ModelWeights {
  Matrix embedding;  // [V, D]
  Matrix head;       // [V, D]; the embedding again where tied
  const float* final_norm = nullptr;
  std::vector<LayerWeights> layers;
  std::vector<std::span<const float>> rope_inv_freq;  // one a ModelSpec::ropes
  std::vector<Buffer> vectors;                        // what the float pointers point into
};

// Called after each layer with the bytes of the checkpoint that have been loaded so far.
using LoadProgress = std::function<void(int64_t loaded_bytes, int64_t total_bytes)>;

// Loads every tensor that `spec` names; what the checkpoint holds beyond that (and is not known to be
// harmless) is an error that names it. Matrices may go on pointing into the checkpoint, which must outlive
// the weights.
Result<ModelWeights> load_weights(const ModelSpec& spec, Checkpoint& checkpoint, Ops& ops,
                                  const LoadProgress& progress = {});

// Bytes of weights that a decode step of one token reads: all matrices once, of the routed experts only the
// chosen share, of the embedding one row. What a token costs at least in memory traffic.
int64_t weight_bytes_per_token(const ModelSpec& spec, const ModelWeights& weights);

}  // namespace nibble
