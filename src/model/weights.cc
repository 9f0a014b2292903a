#include "model/weights.h"

#include <fmt/ranges.h>

#include <array>
#include <cmath>

#include "base/numbers.h"

namespace nibble {
namespace {

// One model's loading: knows where things go, so that the functions below read like the list of tensors.
class Loader {
 public:
  Loader(const ModelSpec& spec, Checkpoint& checkpoint, Ops& ops, ModelWeights& weights)
      : spec_(spec), checkpoint_(checkpoint), ops_(ops), weights_(weights) {}

  Status load(const LoadProgress& progress) {
    const TensorNames& names = spec_.names;
    NIBBLE_RETURN_IF_ERROR(matrix(names.embedding, spec_.vocab, spec_.width, weights_.embedding));
    NIBBLE_RETURN_IF_ERROR(vector(names.final_norm, spec_.width, weights_.final_norm));
    if (spec_.tied_head) {
      weights_.head = weights_.embedding;
      checkpoint_.ignore(names.head + ".weight");  // some files hold the tied head again
    } else {
      NIBBLE_RETURN_IF_ERROR(matrix(names.head, spec_.vocab, spec_.width, weights_.head));
    }
    for (const RopeSpec& rope : spec_.ropes) {
      std::vector<float> inv_freq = rope_frequencies(rope).inv_freq;
      const float* placed = nullptr;
      NIBBLE_RETURN_IF_ERROR(place(inv_freq, "rope frequencies", placed));
      weights_.rope_inv_freq.emplace_back(placed, inv_freq.size());
    }
    weights_.layers.resize(spec_.layers.size());
    for (size_t i = 0; i < spec_.layers.size(); ++i) {
      prefix_ = names.layers + std::to_string(i) + ".";
      NIBBLE_RETURN_IF_ERROR(layer(spec_.layers[i], weights_.layers[i]));
      if (progress) progress(loaded_bytes_, checkpoint_.total_bytes());
    }
    prefix_.clear();
    return refuse_unknown();
  }

 private:
  Status matrix(const std::string& name, int64_t n, int64_t k, Matrix& out) {
    NIBBLE_ASSIGN_OR_RETURN(Matrix host, checkpoint_.matrix(prefix_ + name, n, k));
    loaded_bytes_ += matrix_bytes(host.format, n, k);
    NIBBLE_ASSIGN_OR_RETURN(out, ops_.place(host));
    return {};
  }

  Status vector(const std::string& name, int64_t size, const float*& out) {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<float> values, checkpoint_.floats(prefix_ + name, std::array{size}));
    return place(values, name, out);
  }

  Status place(const std::vector<float>& values, const std::string& purpose, const float*& out) {
    const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(float));
    NIBBLE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(ops_.memory(), bytes, purpose));
    ops_.memory().upload(buffer.as<float>(), values.data(), bytes);
    out = buffer.as<const float>();
    weights_.vectors.push_back(std::move(buffer));
    return {};
  }

  Status layer(const LayerSpec& layer, LayerWeights& out) {
    const TensorNames& names = spec_.names;
    NIBBLE_RETURN_IF_ERROR(vector(names.input_norm, spec_.width, out.input_norm));
    NIBBLE_RETURN_IF_ERROR(vector(names.ffn_norm, spec_.width, out.ffn_norm));
    NIBBLE_RETURN_IF_ERROR(attention(layer.attention, out.attention));
    if (!layer.moe) return glu(names.mlp, layer.dense_width, out.ffn.dense);
    NIBBLE_RETURN_IF_ERROR(matrix(names.router, layer.moe->experts, spec_.width, out.ffn.router));
    // A checkpoint without the bias is one trained without it.
    if (checkpoint_.has(prefix_ + names.router_bias)) {
      NIBBLE_RETURN_IF_ERROR(vector(names.router_bias, layer.moe->experts, out.ffn.router_bias));
    }
    if (layer.moe->shared_width > 0) {
      NIBBLE_RETURN_IF_ERROR(glu(names.shared, layer.moe->shared_width, out.ffn.shared));
    }
    out.ffn.experts.resize(static_cast<size_t>(layer.moe->experts));
    for (size_t e = 0; e < out.ffn.experts.size(); ++e) {
      NIBBLE_RETURN_IF_ERROR(
          glu(names.experts + std::to_string(e) + ".", layer.moe->width, out.ffn.experts[e]));
    }
    return {};
  }

  Status attention(const AttentionSpec& a, AttentionWeights& out) {
    const TensorNames& names = spec_.names;
    NIBBLE_RETURN_IF_ERROR(matrix(names.query, a.query_width(), spec_.width, out.query));
    NIBBLE_RETURN_IF_ERROR(matrix(names.key, a.kv_width(), spec_.width, out.key));
    NIBBLE_RETURN_IF_ERROR(matrix(names.value, a.kv_width(), spec_.width, out.value));
    NIBBLE_RETURN_IF_ERROR(matrix(names.output, spec_.width, a.query_width(), out.output));
    if (a.output_gate != OutputGate::kNone) {
      NIBBLE_RETURN_IF_ERROR(matrix(names.output_gate, a.gate_width(), spec_.width, out.output_gate));
    }
    NIBBLE_RETURN_IF_ERROR(vector(names.query_norm, a.head_dim, out.query_norm));
    NIBBLE_RETURN_IF_ERROR(vector(names.key_norm, a.head_dim, out.key_norm));
    // Scales of an 8-bit KV cache, which ours is not: without them the result is nearer to the original.
    checkpoint_.ignore(prefix_ + names.key + ".k_scale");
    checkpoint_.ignore(prefix_ + names.value + ".v_scale");
    return {};
  }

  Status glu(const std::string& name, int64_t width, ExpertWeights& out) {
    const TensorNames& names = spec_.names;
    NIBBLE_RETURN_IF_ERROR(matrix(name + names.gate_proj, width, spec_.width, out.gate));
    NIBBLE_RETURN_IF_ERROR(matrix(name + names.up_proj, width, spec_.width, out.up));
    return matrix(name + names.down_proj, spec_.width, width, out.down);
  }

  // A tensor that we do not know might have mattered: better no answer than a wrong one.
  Status refuse_unknown() const {
    std::vector<std::string> unknown = checkpoint_.unused();
    if (unknown.empty()) return {};
    constexpr size_t kNamed = 5;
    std::string more = unknown.size() > kNamed ? fmt::format(" and {} more", unknown.size() - kNamed) : "";
    const std::string& file = checkpoint_.file_of(unknown[0]);
    unknown.resize(std::min(unknown.size(), kNamed));
    return user_error("{}: tensors unknown to model_type '{}': {}{}", file, spec_.family,
                      fmt::join(unknown, ", "), more);
  }

  const ModelSpec& spec_;
  Checkpoint& checkpoint_;
  Ops& ops_;
  ModelWeights& weights_;
  std::string prefix_;  // of the layer that is being loaded
  int64_t loaded_bytes_ = 0;
};

int64_t bytes_of(const Matrix& m) { return m.empty() ? 0 : matrix_bytes(m.format, m.n, m.k); }
int64_t bytes_of(const ExpertWeights& w) { return bytes_of(w.gate) + bytes_of(w.up) + bytes_of(w.down); }

}  // namespace

Result<ModelWeights> load_weights(const ModelSpec& spec, Checkpoint& checkpoint, Ops& ops,
                                  const LoadProgress& progress) {
  ModelWeights weights;
  NIBBLE_RETURN_IF_ERROR(Loader(spec, checkpoint, ops, weights).load(progress));
  return weights;
}

int64_t weight_bytes_per_token(const ModelSpec& spec, const ModelWeights& weights) {
  int64_t total = bytes_of(weights.head) + bytes_of(weights.embedding) / spec.vocab;
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const AttentionWeights& a = weights.layers[i].attention;
    const FfnWeights& ffn = weights.layers[i].ffn;
    for (const Matrix* m : {&a.query, &a.key, &a.value, &a.output, &a.output_gate, &ffn.router})
      total += bytes_of(*m);
    total += bytes_of(ffn.dense) + bytes_of(ffn.shared);
    if (!spec.layers[i].moe) continue;
    int64_t experts = 0;
    for (const ExpertWeights& expert : ffn.experts) experts += bytes_of(expert);
    total += experts / spec.layers[i].moe->experts * spec.layers[i].moe->chosen;
  }
  return total;
}

}  // namespace nibble
