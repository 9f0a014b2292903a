#include "model/weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/numbers.h"
#include "base/read_ahead.h"
#include "checkpoint/stacked_names.h"

namespace nibble {
namespace {

int64_t bytes_of(const Matrix& m) { return matrix_bytes(m.format, m.n, m.k); }
int64_t bytes_of(const ExpertWeights& w) { return bytes_of(w.gate) + bytes_of(w.up) + bytes_of(w.down); }

// One model's loading: knows where things go, so that the functions below read like the list of tensors.
class Loader {
 public:
  Loader(const ModelSpec& spec, WeightSource& source, Ops& ops, const ExpertArithmetic& arithmetic,
         ModelWeights& weights)
      : spec_(spec), source_(source), ops_(ops), arithmetic_(arithmetic), weights_(weights) {}

  Status load(const LoadProgress& progress) {
    const TensorNames& names = spec_.names;
    if (arithmetic_.w4a4 &&
        std::ranges::none_of(spec_.layers, [](const LayerSpec& l) { return l.moe.has_value(); })) {
      return user_error("a model without routed experts ({}) has nothing for W4A4", spec_.family);
    }
    if (arithmetic_.w4a4 && !ops_.does_w4a4()) {
      return user_error("device '{}' does W4A4 with --tensor-cores off alone", ops_.name());
    }
    NIBBLE_RETURN_IF_ERROR(
        matrix(names.embedding, spec_.vocab, spec_.width, weights_.embedding, MatrixUse::kEmbedding));
    NIBBLE_RETURN_IF_ERROR(vector(names.final_norm, {spec_.width}, weights_.final_norm));
    if (spec_.tied_head) {
      NIBBLE_RETURN_IF_ERROR(matrix(names.embedding, spec_.vocab, spec_.width, weights_.head));
      source_.ignore(names.head + ".weight");  // some files hold the tied head again
    } else {
      NIBBLE_RETURN_IF_ERROR(matrix(names.head, spec_.vocab, spec_.width, weights_.head));
    }
    for (const RopeSpec& rope : spec_.ropes) {
      std::vector<float> inv_freq = rope_frequencies(rope).inv_freq;
      NIBBLE_RETURN_IF_ERROR(divide_frequencies(inv_freq));
      const float* placed = nullptr;
      NIBBLE_RETURN_IF_ERROR(place(inv_freq, "rope frequencies", placed));
      weights_.rope_inv_freq.emplace_back(placed, inv_freq.size());
    }
    if (spec_.hyper) {
      std::vector<float> ones(static_cast<size_t>(spec_.residual_width()), 1.0f);
      NIBBLE_RETURN_IF_ERROR(place(ones, "unit norm", weights_.ones));
    }
    weights_.layers.resize(spec_.layers.size());
    for (size_t i = 0; i < spec_.layers.size(); ++i) {
      prefix_ = names.layers + std::to_string(i) + ".";
      NIBBLE_RETURN_IF_ERROR(layer(spec_.layers[i], weights_.layers[i]));
      if (progress) progress(loaded_bytes_, source_.total_bytes());
    }
    prefix_.clear();
    return refuse_unknown();
  }

 private:
  Status matrix(const std::string& name, int64_t n, int64_t k, Matrix& out,
                MatrixUse use = MatrixUse::kProducts) {
    NIBBLE_ASSIGN_OR_RETURN(Matrix host, source_.matrix(prefix_ + name, n, k));
    return place(host, out, use);
  }

  Status place(const Matrix& host, Matrix& out, MatrixUse use = MatrixUse::kProducts) {
    count(host.format, bytes_of(host));
    NIBBLE_ASSIGN_OR_RETURN(out, ops_.place(host, use));
    return {};
  }

  void count(MatrixFormat format, int64_t bytes) {
    // Where the backend works on the files' bytes themselves, they come as they are needed. The other half of
    // what is free is for the copies.
    if (!ahead_ && ops_.copies_weights(format))
      ahead_.emplace(source_.mappings(), available_host_bytes() / 2);
    loaded_bytes_ += bytes;
    if (ahead_) ahead_->advance(loaded_bytes_);
  }

  Status vector(const std::string& name, const std::vector<int64_t>& shape, const float*& out) {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<float> values, source_.floats(prefix_ + name, shape));
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

  // Where a file has the scaling of its frequencies as numbers.
  Status divide_frequencies(std::vector<float>& inv_freq) {
    const std::string& name = spec_.names.rope_divisors;
    if (name.empty() || !source_.has(name)) return {};
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<float> divisors,
                            source_.floats(name, std::array{std::ssize(inv_freq)}));
    for (size_t i = 0; i < inv_freq.size(); ++i) {
      if (divisors[i] <= 0) {
        return user_error("{}: tensor '{}': wanted values above 0, found {} at {}", source_.file_of(name),
                          name, divisors[i], i);
      }
      inv_freq[i] /= divisors[i];
    }
    return {};
  }

  // A matrix that is stored without ".weight" behind its name: small ones, as float32.
  Status plain_matrix(const std::string& name, int64_t n, int64_t k, Matrix& out) {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<float> values, source_.floats(prefix_ + name, std::array{n, k}));
    return place(
        {.format = MatrixFormat::kF32, .n = n, .k = k, .codes = keep(std::as_bytes(std::span(values)))}, out);
  }

  // Host bytes that live as long as the weights.
  const void* keep(std::span<const std::byte> bytes) {
    return weights_.host_matrices.emplace_back(bytes.begin(), bytes.end()).data();
  }

  Status layer(const LayerSpec& layer, LayerWeights& out) {
    const TensorNames& names = spec_.names;
    NIBBLE_RETURN_IF_ERROR(vector(names.input_norm, {spec_.width}, out.input_norm));
    NIBBLE_RETURN_IF_ERROR(vector(names.ffn_norm, {spec_.width}, out.ffn_norm));
    if (spec_.hyper) {
      NIBBLE_RETURN_IF_ERROR(hyper("hc_attn_", out.mixer_hyper));
      NIBBLE_RETURN_IF_ERROR(hyper("hc_ffn_", out.ffn_hyper));
    }
    if (const auto* gqa = std::get_if<GqaSpec>(&layer.mixer)) {
      NIBBLE_RETURN_IF_ERROR(load_gqa(*gqa, out.mixer.emplace<GqaWeights>()));
    } else if (const auto* mla = std::get_if<MlaSpec>(&layer.mixer)) {
      NIBBLE_RETURN_IF_ERROR(load_mla(*mla, out.mixer.emplace<MlaWeights>()));
    } else {
      NIBBLE_RETURN_IF_ERROR(load_kda(std::get<KdaSpec>(layer.mixer), out.mixer.emplace<KdaWeights>()));
    }
    return layer.moe ? load_moe(*layer.moe, out.ffn) : glu(names.mlp, layer.dense_width, out.ffn.dense);
  }

  Status hyper(const std::string& name, HyperWeights& out) {
    const int64_t mix = spec_.hyper->mix_width();
    NIBBLE_RETURN_IF_ERROR(plain_matrix(name + "fn", mix, spec_.residual_width(), out.mix));
    NIBBLE_RETURN_IF_ERROR(vector(name + "base", {mix}, out.base));
    return vector(name + "scale", {3}, out.scale);
  }

  Status load_gqa(const GqaSpec& spec, GqaWeights& out) {
    const std::string& at = spec_.names.attention;
    const int64_t query = spec.query_width(), kv = spec.kv_width();
    NIBBLE_RETURN_IF_ERROR(matrix(at + "q_proj", query, spec_.width, out.query));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "k_proj", kv, spec_.width, out.key));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "v_proj", kv, spec_.width, out.value));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "o_proj", spec_.width, query, out.output));
    if (spec.qkv_bias) {
      NIBBLE_RETURN_IF_ERROR(vector(at + "q_proj.bias", {query}, out.query_bias));
      NIBBLE_RETURN_IF_ERROR(vector(at + "k_proj.bias", {kv}, out.key_bias));
      NIBBLE_RETURN_IF_ERROR(vector(at + "v_proj.bias", {kv}, out.value_bias));
    }
    if (spec.output_bias) NIBBLE_RETURN_IF_ERROR(vector(at + "o_proj.bias", {spec_.width}, out.output_bias));
    if (spec.output_gate != OutputGate::kNone) {
      NIBBLE_RETURN_IF_ERROR(matrix(at + "g_proj", spec.gate_width(), spec_.width, out.output_gate));
    }
    if (spec.qk_norm != QkNorm::kNone) {
      const bool full = spec.qk_norm == QkNorm::kFull;
      NIBBLE_RETURN_IF_ERROR(vector(at + "q_norm.weight", {full ? query : spec.head_dim}, out.query_norm));
      NIBBLE_RETURN_IF_ERROR(vector(at + "k_norm.weight", {full ? kv : spec.head_dim}, out.key_norm));
    }
    if (spec.sinks) NIBBLE_RETURN_IF_ERROR(vector(at + "sinks", {spec.heads}, out.sinks));
    // Scales of an 8-bit KV cache, which ours is not: without them the result is nearer to the original.
    source_.ignore(prefix_ + at + "k_proj.k_scale");
    source_.ignore(prefix_ + at + "v_proj.v_scale");
    return {};
  }

  Status load_mla(const MlaSpec& spec, MlaWeights& out) {
    const std::string& at = spec_.names.attention;
    const int64_t query = spec.heads * spec.query_dim();
    if (spec.q_rank > 0) {
      NIBBLE_RETURN_IF_ERROR(matrix(at + "q_a_proj", spec.q_rank, spec_.width, out.query_down));
      NIBBLE_RETURN_IF_ERROR(vector(at + "q_a_layernorm.weight", {spec.q_rank}, out.query_norm));
      NIBBLE_RETURN_IF_ERROR(matrix(at + "q_b_proj", query, spec.q_rank, out.query_up));
    } else {
      NIBBLE_RETURN_IF_ERROR(matrix(at + "q_proj", query, spec_.width, out.query_up));
    }
    NIBBLE_RETURN_IF_ERROR(matrix(at + "kv_a_proj_with_mqa", spec.latent_dim(), spec_.width, out.latent));
    NIBBLE_RETURN_IF_ERROR(vector(at + "kv_a_layernorm.weight", {spec.kv_rank}, out.latent_norm));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "o_proj", spec_.width, spec.heads * spec.value_dim, out.output));
    NIBBLE_RETURN_IF_ERROR(absorb(at + "kv_b_proj", spec, out));
    return spec.indexer ? load_indexer(at + "indexer.", *spec.indexer, spec.q_rank, out.indexer) : Status();
  }

  // Cuts kv_b [H * (nope + value), kv_rank] into what each head does to its query and to its output.
  Status absorb(const std::string& name, const MlaSpec& spec, MlaWeights& out) {
    const int64_t rows = spec.nope_dim + spec.value_dim, rank = spec.kv_rank;
    NIBBLE_ASSIGN_OR_RETURN(Matrix kv_b, source_.matrix(prefix_ + name, spec.heads * rows, rank));
    std::vector<float> row(static_cast<size_t>(rank)), key(static_cast<size_t>(rank * spec.nope_dim)),
        value(static_cast<size_t>(spec.value_dim * rank));
    for (int64_t h = 0; h < spec.heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        dequantize_row(kv_b, h * rows + i, row.data());
        for (int64_t r = 0; r < rank; ++r) {
          const float w = row[static_cast<size_t>(r)];
          if (i < spec.nope_dim) {
            key[static_cast<size_t>(r * spec.nope_dim + i)] = w;
          } else {
            value[static_cast<size_t>((i - spec.nope_dim) * rank + r)] = w;
          }
        }
      }
      const Matrix key_host = {.format = MatrixFormat::kF32,
                               .n = rank,
                               .k = spec.nope_dim,
                               .codes = keep(std::as_bytes(std::span(key)))};
      const Matrix value_host = {.format = MatrixFormat::kF32,
                                 .n = spec.value_dim,
                                 .k = rank,
                                 .codes = keep(std::as_bytes(std::span(value)))};
      NIBBLE_RETURN_IF_ERROR(place(key_host, out.key_absorb_H.emplace_back()));
      NIBBLE_RETURN_IF_ERROR(place(value_host, out.value_up_H.emplace_back()));
    }
    return {};
  }

  Status load_indexer(const std::string& at, const IndexerSpec& spec, int64_t q_rank, IndexerWeights& out) {
    NIBBLE_RETURN_IF_ERROR(matrix(at + "wq_b", spec.query_width(), q_rank, out.query));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "wk", spec.head_dim, spec_.width, out.key));
    NIBBLE_RETURN_IF_ERROR(vector(at + "k_norm.weight", {spec.head_dim}, out.key_norm));
    NIBBLE_RETURN_IF_ERROR(vector(at + "k_norm.bias", {spec.head_dim}, out.key_norm_bias));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "weights_proj", spec.heads, spec_.width, out.head_weights));
    NIBBLE_RETURN_IF_ERROR(vector(at + "index_kpool_compress_ape", {spec.pool, spec.head_dim}, out.ape));
    return plain_matrix(at + "index_kpool_compress_gate", spec.head_dim, spec_.width, out.gate);
  }

  Status load_kda(const KdaSpec& spec, KdaWeights& out) {
    const std::string& at = spec_.names.attention;
    const int64_t width = spec.width(), d = spec_.width;
    NIBBLE_RETURN_IF_ERROR(matrix(at + "q_proj", width, d, out.query));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "k_proj", width, d, out.key));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "v_proj", width, d, out.value));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "o_proj", d, width, out.output));
    NIBBLE_RETURN_IF_ERROR(vector(at + "q_conv1d.weight", {width, 1, spec.taps}, out.query_conv));
    NIBBLE_RETURN_IF_ERROR(vector(at + "k_conv1d.weight", {width, 1, spec.taps}, out.key_conv));
    NIBBLE_RETURN_IF_ERROR(vector(at + "v_conv1d.weight", {width, 1, spec.taps}, out.value_conv));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "f_a_proj", spec.head_dim, d, out.decay_down));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "f_b_proj", width, spec.head_dim, out.decay_up));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "g_a_proj", spec.head_dim, d, out.gate_down));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "g_b_proj", width, spec.head_dim, out.gate_up));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "b_proj", spec.heads, d, out.beta));
    NIBBLE_RETURN_IF_ERROR(vector(at + "dt_bias", {width}, out.dt_bias));
    NIBBLE_RETURN_IF_ERROR(vector(at + "A_log", {spec.heads}, out.a_log));
    return vector(at + "o_norm.weight", {spec.head_dim}, out.output_norm);
  }

  Status load_moe(const MoeSpec& spec, FfnWeights& out) {
    const TensorNames& names = spec_.names;
    NIBBLE_RETURN_IF_ERROR(matrix(names.router, spec.experts, spec_.width, out.router));
    if (spec.router_logit_bias) {
      NIBBLE_RETURN_IF_ERROR(vector(names.router + ".bias", {spec.experts}, out.router_logit_bias));
    }
    // Where it is not required, a checkpoint without the bias is one trained without it.
    if (spec.router_bias_required || source_.has(prefix_ + names.router_bias)) {
      NIBBLE_RETURN_IF_ERROR(vector(names.router_bias, {spec.experts}, out.router_bias));
    }
    if (spec.shared_width > 0)
      NIBBLE_RETURN_IF_ERROR(glu(names.shared, spec.shared_width, out.shared, MatrixUse::kSharedDown));
    if (spec.stacked) return load_stacked_experts(spec, out);
    std::vector<ExpertWeights> experts(static_cast<size_t>(spec.experts));
    for (size_t e = 0; e < experts.size(); ++e) {
      const std::string at = prefix_ + names.experts + std::to_string(e) + ".";
      auto load = [&](const std::string& name, int64_t n, int64_t k, Matrix& host) -> Status {
        NIBBLE_ASSIGN_OR_RETURN(host, source_.matrix(at + name, n, k));
        return {};
      };
      NIBBLE_RETURN_IF_ERROR(load(names.gate_proj, spec.width, spec_.width, experts[e].gate));
      NIBBLE_RETURN_IF_ERROR(load(names.up_proj, spec.width, spec_.width, experts[e].up));
      NIBBLE_RETURN_IF_ERROR(load(names.down_proj, spec_.width, spec.width, experts[e].down));
    }
    return place_experts(experts, out);
  }

  // gpt-oss: gate in the even rows of gate_up, up in the odd ones.
  Status load_stacked_experts(const MoeSpec& spec, FfnWeights& out) {
    const std::string gate_up = prefix_ + spec_.names.experts + kStackedGateUp,
                      down = prefix_ + spec_.names.experts + kStackedDown;
    std::vector<ExpertWeights> experts(static_cast<size_t>(spec.experts));
    auto load = [&](const std::string& name, int64_t n, int64_t k, RowSplit split,
                    Matrix ExpertWeights::*matrix_of, const float* ExpertWeights::*bias_of) -> Status {
      NIBBLE_ASSIGN_OR_RETURN(std::vector<Matrix> matrices, source_.stacked(name, spec.experts, n, k, split));
      for (size_t e = 0; e < matrices.size(); ++e) experts[e].*matrix_of = matrices[e];
      if (!spec.biases) return {};
      NIBBLE_ASSIGN_OR_RETURN(std::vector<float> biases, source_.stacked_bias(name, spec.experts, n, split));
      const float* placed = nullptr;
      NIBBLE_RETURN_IF_ERROR(place(biases, StackedNames(name).bias, placed));
      for (size_t e = 0; e < matrices.size(); ++e) experts[e].*bias_of = placed + static_cast<int64_t>(e) * n;
      return {};
    };
    NIBBLE_RETURN_IF_ERROR(load(gate_up, spec.width, spec_.width, RowSplit::kEven, &ExpertWeights::gate,
                                &ExpertWeights::gate_bias));
    NIBBLE_RETURN_IF_ERROR(
        load(gate_up, spec.width, spec_.width, RowSplit::kOdd, &ExpertWeights::up, &ExpertWeights::up_bias));
    NIBBLE_RETURN_IF_ERROR(
        load(down, spec_.width, spec.width, RowSplit::kAll, &ExpertWeights::down, &ExpertWeights::down_bias));
    return place_experts(experts, out);
  }

  Status place_experts(std::vector<ExpertWeights>& host, FfnWeights& out) {
    if (arithmetic_.w4a4) NIBBLE_RETURN_IF_ERROR(prepare_w4a4(host));
    for (const ExpertWeights& expert : host) count(expert.gate.format, bytes_of(expert));
    NIBBLE_ASSIGN_OR_RETURN(out.experts, ops_.place_experts(host));
    return {};
  }

  Status prepare_w4a4(std::vector<ExpertWeights>& experts) {
    const bool is_static = arithmetic_.act_scale == ActScale::kStatic;
    const std::string layer = prefix_ + spec_.names.experts;
    bool calibrated = false;
    for (size_t e = 0; e < experts.size(); ++e) {
      ExpertWeights& w = experts[e];
      auto check = [&](const std::string& name, const Matrix& m) -> Status {
        const std::string full_name = fmt::format("{}{}.{}", layer, e, name);
        const std::string& file = source_.file_of(full_name + ".weight");
        if (m.format != MatrixFormat::kNvfp4 && m.format != MatrixFormat::kGgufNvfp4) {
          return user_error("{}: '{}' is {}; W4A4 wants experts in NVFP4", file, full_name,
                            matrix_format_name(m.format));
        }
        if (is_static && !(m.input_scale >= 0 && std::isfinite(m.input_scale))) {
          return user_error("{}: the input scale of '{}': wanted a finite value of at least 0, found {}",
                            file, full_name, m.input_scale);
        }
        calibrated |= m.input_scale > 0;
        return {};
      };
      NIBBLE_RETURN_IF_ERROR(check(spec_.names.gate_proj, w.gate));
      NIBBLE_RETURN_IF_ERROR(check(spec_.names.up_proj, w.up));
      NIBBLE_RETURN_IF_ERROR(check(spec_.names.down_proj, w.down));
      // One quantized row goes into gate and up; the larger scale holds what either calibration saw.
      w.input_scale = std::max(w.gate.input_scale, w.up.input_scale);
      w.down_input_scale = w.down.input_scale;
    }
    if (is_static && !calibrated) {
      return user_error("{}: no expert of '{}' has an input scale, which static activation scales need",
                        source_.file_of(fmt::format("{}0.{}.weight", layer, spec_.names.gate_proj)), layer);
    }
    return {};
  }

  Status glu(const std::string& at, int64_t width, ExpertWeights& out,
             MatrixUse down_use = MatrixUse::kProducts) {
    NIBBLE_RETURN_IF_ERROR(matrix(at + "gate_proj", width, spec_.width, out.gate));
    NIBBLE_RETURN_IF_ERROR(matrix(at + "up_proj", width, spec_.width, out.up));
    return matrix(at + "down_proj", spec_.width, width, out.down, down_use);
  }

  // A tensor that we do not know might have mattered: better no answer than a wrong one.
  Status refuse_unknown() const {
    std::vector<std::string> unknown;
    for (std::string& name : source_.unused()) {
      const auto& prefixes = spec_.names.ignored_prefixes;
      const bool known = std::any_of(prefixes.begin(), prefixes.end(),
                                     [&](const std::string& p) { return name.starts_with(p); });
      if (!known) unknown.push_back(std::move(name));
    }
    if (unknown.empty()) return {};
    constexpr size_t kNamed = 5;
    const std::string more =
        unknown.size() > kNamed ? fmt::format(" and {} more", unknown.size() - kNamed) : "";
    const std::string& file = source_.file_of(unknown[0]);
    unknown.resize(std::min(unknown.size(), kNamed));
    return user_error("{}: tensors unknown to model_type '{}': {}{}", file, spec_.family,
                      fmt::join(unknown, ", "), more);
  }

  const ModelSpec& spec_;
  WeightSource& source_;
  Ops& ops_;
  const ExpertArithmetic& arithmetic_;
  ModelWeights& weights_;
  std::string prefix_;  // of the layer that is being loaded
  int64_t loaded_bytes_ = 0;
  std::optional<ReadAhead> ahead_;
};

int64_t bytes_of(const GqaWeights& w) {
  return bytes_of(w.query) + bytes_of(w.key) + bytes_of(w.value) + bytes_of(w.output) +
         bytes_of(w.output_gate);
}

int64_t bytes_of(const MlaWeights& w) {
  int64_t total = bytes_of(w.query_down) + bytes_of(w.query_up) + bytes_of(w.latent) + bytes_of(w.output);
  for (const Matrix& m : w.key_absorb_H) total += bytes_of(m);
  for (const Matrix& m : w.value_up_H) total += bytes_of(m);
  const IndexerWeights& i = w.indexer;
  return total + bytes_of(i.query) + bytes_of(i.key) + bytes_of(i.gate) + bytes_of(i.head_weights);
}

int64_t bytes_of(const KdaWeights& w) {
  int64_t total =
      bytes_of(w.query) + bytes_of(w.key) + bytes_of(w.value) + bytes_of(w.output) + bytes_of(w.beta);
  return total + bytes_of(w.decay_down) + bytes_of(w.decay_up) + bytes_of(w.gate_down) + bytes_of(w.gate_up);
}

}  // namespace

Result<ModelWeights> load_weights(const ModelSpec& spec, WeightSource& source, Ops& ops,
                                  const ExpertArithmetic& arithmetic, const LoadProgress& progress) {
  ModelWeights weights;
  NIBBLE_RETURN_IF_ERROR(Loader(spec, source, ops, arithmetic, weights).load(progress));
  return weights;
}

int64_t weight_bytes_of_step(const ModelSpec& spec, const ModelWeights& weights, int64_t rows,
                             std::span<const int64_t> experts, bool logits) {
  NIBBLE_CHECK(experts.size() == weights.layers.size());
  int64_t total = (logits ? bytes_of(weights.head) : 0) + bytes_of(weights.embedding) / spec.vocab * rows;
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& layer = weights.layers[i];
    total += std::visit([](const auto& mixer) { return bytes_of(mixer); }, layer.mixer);
    total += bytes_of(layer.mixer_hyper.mix) + bytes_of(layer.ffn_hyper.mix);
    total += bytes_of(layer.ffn.dense) + bytes_of(layer.ffn.shared) + bytes_of(layer.ffn.router);
    if (!spec.layers[i].moe) continue;
    int64_t all = 0;
    for (const ExpertWeights& expert : layer.ffn.experts->experts()) all += bytes_of(expert);
    total += all / spec.layers[i].moe->experts * experts[i];
  }
  return total;
}

int64_t weight_bytes_per_token(const ModelSpec& spec, const ModelWeights& weights) {
  std::vector<int64_t> chosen;
  for (const LayerSpec& layer : spec.layers) chosen.push_back(layer.moe ? layer.moe->chosen : 0);
  return weight_bytes_of_step(spec, weights, 1, chosen, true);
}

}  // namespace nibble
