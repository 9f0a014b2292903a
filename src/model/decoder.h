// The forward pass: a step of rows of several sequences, from token ids to logits. Written once, over Ops.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "kv/kv_cache.h"
#include "model/activations.h"
#include "model/spec.h"
#include "model/step.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace nibble {

enum class WantLogits { kNone, kLast, kAll };

// New tokens of one sequence.
struct SequenceStep {
  int32_t slot = 0;              // from Decoder::kv().add_sequence()
  std::span<const int32_t> ids;  // at least one
  WantLogits logits = WantLogits::kLast;
};

struct DecoderOptions {
  KvOptions kv;
  int64_t max_rows = 256;      // of one step, all sequences together
  int64_t max_logit_rows = 1;  // rows of one step whose logits are wanted
  ExpertArithmetic arithmetic = {};
};

class Decoder {
 public:
  // `ops` and whatever `weights` point into must outlive the decoder.
  static Result<std::unique_ptr<Decoder>> create(Ops& ops, ModelSpec spec, ModelWeights weights,
                                                 const DecoderOptions& options);
  // Bytes of KV cache and activations that create() would allocate.
  static Result<int64_t> plan_bytes(const ModelSpec& spec, const DecoderOptions& options);
  // The largest step that it would run. REQUIRES plan_bytes() to be ok.
  static StepShape largest_step(const ModelSpec& spec, const DecoderOptions& options);

  // Appends each step's ids to its sequence and returns the wanted logits [rows, V] in host memory, in the
  // order of the steps; valid until the next call. One step a slot. On error (an id outside the vocabulary,
  // too many rows, no room in the KV cache) no sequence has changed.
  Result<Rows<const float>> forward(std::span<const SequenceStep> steps, const Trace* trace = nullptr);
  // The same, but of each row of logits only the largest, as Ops::top_logits has them: [rows, min(V,
  // kTopLogits)]. The others need not leave the device.
  Result<Rows<const TokenLogit>> forward_top(std::span<const SequenceStep> steps,
                                             const Trace* trace = nullptr);

  KvCache& kv() { return kv_; }
  const ModelSpec& spec() const { return spec_; }
  const ModelWeights& weights() const { return weights_; }
  const DecoderOptions& options() const { return options_; }
  Ops& ops() { return ops_; }

 private:
  Decoder(Ops& ops, ModelSpec spec, ModelWeights weights, const DecoderOptions& options, KvCache kv,
          ActivationMemory activations);
  Status check(std::span<const SequenceStep> steps) const;
  // Both of forward: T float with the logits, or TokenLogit with the top_logits.
  template <class T>
  Result<Rows<const T>> run(std::span<const SequenceStep> steps, Rows<T> Activations::*wanted,
                            const Trace* trace);
  void run_layers(Step& step);
  void head(Step& step);  // the logits of the rows that are wanted
  // One sublayer with its place in the residual: `run` goes from step.input to step.add_to or act.sublayer.
  template <class Run>
  void sublayer(Step& step, const float* norm, const HyperWeights& hyper, Run run);

  static uint64_t next_id();

  const uint64_t id_ = next_id();  // what repeats is this decoder's, not another's on the same backend
  Ops& ops_;
  ModelSpec spec_;
  ModelWeights weights_;
  DecoderOptions options_;
  KvCache kv_;
  ActivationMemory activations_;
  std::vector<LayerCache> caches_;   // of each layer
  std::vector<float> rope_factors_;  // of each ModelSpec::ropes
  Buffer host_logits_;               // in memory().host_side(): what forward() returned; grows with it
};

}  // namespace nibble
