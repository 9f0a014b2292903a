// Kimi delta attention as a sublayer (spec/models.md 1). Recurrent for every number of rows: a form in chunks
// would round differently from decoding and break the promise of equal bits.
#include "model/mixers.h"

namespace nibble {
namespace {

enum Scratch : size_t { kQuery, kKey, kValue, kDecayDown, kDecay, kBeta, kOut, kGateDown, kGate };
enum States : size_t { kQueryConv, kKeyConv, kValueConv, kState };

}  // namespace

std::vector<int64_t> kda_scratch(const KdaSpec& spec) {
  const int64_t w = spec.width();
  return {w, w, w, spec.head_dim, w, spec.heads, w, spec.head_dim, w};
}

void kda(Step& step, const LayerCache& cache, const KdaSpec& spec, const KdaWeights& weights) {
  Ops& ops = step.ops;
  Activations& act = step.act;
  auto view = [&](Scratch which, int64_t cols) { return narrow(act.mixer[which], cols); };
  const int64_t width = spec.width();
  Rows<float> query = view(kQuery, width), key = view(kKey, width), value = view(kValue, width);
  Rows<float> decay_down = view(kDecayDown, spec.head_dim), decay = view(kDecay, width),
              beta = view(kBeta, spec.heads), gate_down = view(kGateDown, spec.head_dim);
  const Product products[] = {{weights.query, nullptr, query}, {weights.key, nullptr, key},
                              {weights.value, nullptr, value}, {weights.decay_down, nullptr, decay_down},
                              {weights.beta, nullptr, beta},   {weights.gate_down, nullptr, gate_down}};
  input_products(step, products);
  auto convolve = [&](const float* conv, States state, Rows<float> x) {
    ops.causal_conv({.x = x,
                     .weight = conv,
                     .taps = spec.taps,
                     .state = step.kv.state(cache.states[state]),
                     .rows = step.rows,
                     .out = x});
  };
  convolve(weights.query_conv, kQueryConv, query);
  convolve(weights.key_conv, kKeyConv, key);
  convolve(weights.value_conv, kValueConv, value);
  ops.linear(decay_down, weights.decay_up, decay);
  Rows<float> out = view(kOut, width);
  ops.kda({.q = query,
           .k = key,
           .v = value,
           .decay = decay,
           .beta = beta,
           .dt_bias = weights.dt_bias,
           .a_log = weights.a_log,
           .gate_lower_bound = spec.gate_lower_bound,
           .state = step.kv.state(cache.states[kState]),
           .rows = step.rows,
           .out = out});
  norm_heads(step, out, spec.head_dim, weights.output_norm);

  Rows<float> gate = view(kGate, width);
  ops.linear(gate_down, weights.gate_up, gate);
  ops.gate_output(OutputGate::kSigmoidElement, gate, spec.head_dim, out);
  output(step, out, weights.output);
}

}  // namespace nibble
