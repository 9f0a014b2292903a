// One model in two containers: what a source holds, written as safetensors and as GGUF.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/faulty_file.h"
#include "base/hash.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/write_gguf.h"
#include "checkpoint/write_safetensors.h"
#include "model/gguf_config.h"
#include "model/gguf_weights.h"

namespace nibble {

// A tensor as float32, and where it is a matrix in the format of its source.
struct RecordedTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
  std::vector<Matrix> matrices;  // one, or one for each expert; none of a vector
};

inline std::vector<float> dequantized(const Matrix& matrix) {
  std::vector<float> values(static_cast<size_t>(matrix.n * matrix.k));
  for (int64_t n = 0; n < matrix.n; ++n) dequantize_row(matrix, n, values.data() + n * matrix.k);
  return values;
}

// Remembers what a loader asks for; without a source it answers with random numbers that depend on the name.
class Recorder : public WeightSource {
 public:
  explicit Recorder(WeightSource* from = nullptr) : from_(from) {}

  // "NAME", "PREFIX.weight", and of stacked ones "NAME/gate", "NAME/up", "NAME/down", with "_bias" behind
  // NAME.
  std::map<std::string, RecordedTensor> tensors;

  bool has(const std::string& name) const override { return from_ != nullptr && from_->has(name); }
  int64_t total_bytes() const override { return 0; }
  std::vector<StoredTensor> stored() const override { return {}; }
  Result<std::vector<float>> floats(const std::string& name, std::span<const int64_t> shape) override {
    RecordedTensor& tensor = tensors[name];
    tensor.shape.assign(shape.begin(), shape.end());
    tensor.values = random(name, shape);
    if (from_ != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(tensor.values, from_->floats(name, shape));
    }
    return tensor.values;
  }
  Result<Matrix> matrix(const std::string& prefix, int64_t n, int64_t k) override {
    RecordedTensor& tensor = tensors[prefix + ".weight"];
    tensor.shape = {n, k};
    if (from_ != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(const Matrix found, from_->matrix(prefix, n, k));
      tensor.matrices = {found};
      tensor.values = dequantized(found);
      return found;
    }
    tensor.values = random(prefix, tensor.shape);
    return Matrix{.format = MatrixFormat::kF32, .n = n, .k = k, .codes = tensor.values.data()};
  }
  Result<std::vector<Matrix>> stacked(const std::string& name, int64_t experts, int64_t n, int64_t k,
                                      RowSplit split) override {
    RecordedTensor& tensor = tensors[name + half(split)];
    tensor.shape = {experts, n, k};
    NIBBLE_ASSIGN_OR_RETURN(tensor.matrices, from_->stacked(name, experts, n, k, split));
    tensor.values.clear();
    for (const Matrix& matrix : tensor.matrices) {
      const std::vector<float> values = dequantized(matrix);
      tensor.values.insert(tensor.values.end(), values.begin(), values.end());
    }
    return tensor.matrices;
  }
  Result<std::vector<float>> stacked_bias(const std::string& name, int64_t experts, int64_t n,
                                          RowSplit split) override {
    RecordedTensor& tensor = tensors[name + "_bias" + half(split)];
    tensor.shape = {experts, n};
    NIBBLE_ASSIGN_OR_RETURN(tensor.values, from_->stacked_bias(name, experts, n, split));
    return tensor.values;
  }
  void ignore(const std::string& name) override {
    if (from_ != nullptr) from_->ignore(name);
  }
  std::vector<std::string> unused() const override {
    return from_ != nullptr ? from_->unused() : std::vector<std::string>();
  }
  const std::string& file_of(const std::string& name) const override { return name; }

 private:
  static const char* half(RowSplit split) {
    return split == RowSplit::kAll ? "/down" : split == RowSplit::kEven ? "/gate" : "/up";
  }
  static std::vector<float> random(const std::string& name, std::span<const int64_t> shape) {
    int64_t count = 1;
    for (int64_t dim : shape) count *= dim;
    std::mt19937 generator(static_cast<uint32_t>(hash_text(name)));
    std::normal_distribution<float> normal(name.find("norm") != std::string::npos ? 1.0f : 0.0f, 0.1f);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(generator);
    return values;
  }

  WeightSource* from_;
};

using RecordedTensors = std::map<std::string, RecordedTensor>;

// All as F32; what is stacked lies transposed, gate and up in turn.
inline std::string safetensors_of(const RecordedTensors& tensors) {
  SafetensorsWriter writer;
  for (const auto& [name, tensor] : tensors) {
    const size_t slash = name.find('/');
    const std::string plain = name.substr(0, slash);
    if (slash == std::string::npos) {
      writer.add(name, "F32", tensor.shape, bytes_of(tensor.values));
      continue;
    }
    const std::string half = name.substr(slash);
    if (half == "/up") continue;  // goes with its gate
    const RecordedTensor* up = half == "/gate" ? &tensors.at(plain + "/up") : nullptr;
    const int64_t parts = up != nullptr ? 2 : 1;
    const bool is_bias = tensor.shape.size() == 2;
    const int64_t experts = tensor.shape[0], n = tensor.shape[1], k = is_bias ? 1 : tensor.shape[2];
    std::vector<float> values;
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t c = 0; c < k; ++c) {
        for (int64_t r = 0; r < n; ++r) {
          const auto at = static_cast<size_t>((e * n + r) * k + c);
          values.push_back(tensor.values[at]);
          if (up != nullptr) values.push_back(up->values[at]);
        }
      }
    }
    std::vector<int64_t> shape = {experts, k, n * parts};
    if (is_bias) shape = {experts, n * parts};
    writer.add(plain, "F32", shape, bytes_of(values));
  }
  return writer.file();
}

inline constexpr uint32_t kGgufF32 = 0, kGgufBf16 = 30, kGgufMxfp4 = 39, kGgufNvfp4 = 40;

// Codes of two neighbours a byte to those of two halves of `group` values a byte.
inline std::string half_split(const uint8_t* codes, int64_t group) {
  const auto code = [&](int64_t i) { return i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4; };
  std::string bytes;
  for (int64_t j = 0; j < group / 2; ++j) bytes += static_cast<char>(code(j) | code(j + group / 2) << 4);
  return bytes;
}

// A matrix in GGUF's blocks of the same numbers, type and bytes.
inline std::pair<uint32_t, std::string> blocks_of(const Matrix& matrix) {
  const auto* codes = static_cast<const uint8_t*>(matrix.codes);
  const auto* scales = static_cast<const uint8_t*>(matrix.scales);
  std::string bytes;
  switch (matrix.format) {
    case MatrixFormat::kBF16:
      return {kGgufBf16,
              {reinterpret_cast<const char*>(codes), static_cast<size_t>(2 * matrix.n * matrix.k)}};
    case MatrixFormat::kNvfp4:
      for (int64_t at = 0; at < matrix.n * matrix.k; at += 64) {
        bytes.append(reinterpret_cast<const char*>(scales + at / 16), 4);
        for (int64_t group = at; group < at + 64; group += 16) bytes += half_split(codes + group / 2, 16);
      }
      return {kGgufNvfp4, bytes};
    case MatrixFormat::kMxfp4:
      for (int64_t at = 0; at < matrix.n * matrix.k; at += 32) {
        bytes += static_cast<char>(scales[at / 32]);
        bytes += half_split(codes + at / 2, 32);
      }
      return {kGgufMxfp4, bytes};
    default:
      return {kGgufF32, bytes_of(dequantized(matrix))};
  }
}

// What GGUF calls a tensor, by the table of docs/formats-gguf.md; `ffn_norm` differs between architectures.
inline std::string gguf_name(const std::string& name, const std::string& ffn_norm) {
  static const std::vector<std::pair<std::string, std::string>> kNames = {
      {"model.embed_tokens.", "token_embd."},
      {"model.norm.", "output_norm."},
      {"lm_head.", "output."},
      {"model.layers.", "blk."},
      {"input_layernorm.", "attn_norm."},
      {"self_attn.q_norm.", "attn_q_norm."},
      {"self_attn.k_norm.", "attn_k_norm."},
      {"self_attn.q_proj.", "attn_q."},
      {"self_attn.k_proj.", "attn_k."},
      {"self_attn.v_proj.", "attn_v."},
      {"self_attn.o_proj.", "attn_output."},
      {"self_attn.g_proj.", "attn_gate."},
      {"self_attn.sinks", "attn_sinks.weight"},
      {"mlp.experts.e_score_correction_bias", "exp_probs_b.bias"},
      {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias"},
      {"mlp.shared_experts.gate_proj.", "ffn_gate_shexp."},
      {"mlp.shared_experts.up_proj.", "ffn_up_shexp."},
      {"mlp.shared_experts.down_proj.", "ffn_down_shexp."},
      {"mlp.shared_expert.gate_proj.", "ffn_gate_shexp."},
      {"mlp.shared_expert.up_proj.", "ffn_up_shexp."},
      {"mlp.shared_expert.down_proj.", "ffn_down_shexp."},
      {"block_sparse_moe.gate.", "ffn_gate_inp."},
      {"block_sparse_moe.experts.", "mlp.experts."},
      {".w1.", ".gate_proj."},
      {".w3.", ".up_proj."},
      {".w2.", ".down_proj."},
      {"mlp.gate_proj.", "ffn_gate."},
      {"mlp.up_proj.", "ffn_up."},
      {"mlp.down_proj.", "ffn_down."},
      {"mlp.gate.", "ffn_gate_inp."},
      {"mlp.router.", "ffn_gate_inp."},
      {"mlp.experts.gate_up_proj_bias/gate", "ffn_gate_exps.bias"},
      {"mlp.experts.gate_up_proj_bias/up", "ffn_up_exps.bias"},
      {"mlp.experts.down_proj_bias/down", "ffn_down_exps.bias"},
      {"mlp.experts.gate_up_proj/gate", "ffn_gate_exps.weight"},
      {"mlp.experts.gate_up_proj/up", "ffn_up_exps.weight"},
      {"mlp.experts.down_proj/down", "ffn_down_exps.weight"},
  };
  std::string text = name;
  for (const auto& [from, to] : kNames) {
    if (const size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), to);
  }
  if (const size_t at = text.find("post_attention_layernorm."); at != std::string::npos)
    text.replace(at, text.size(), ffn_norm + ".weight");
  return text;
}

enum class Packing { kF32, kAsStored };

// Adds all tensors; experts of one layer become one tensor, with their tensor scales beside it.
inline void add_tensors(GgufWriter& writer, const RecordedTensors& tensors, const std::string& ffn_norm,
                        Packing packing) {
  std::map<std::string, std::vector<const RecordedTensor*>> gathered;
  for (const auto& [name, tensor] : tensors) {
    // ".experts.7.gate_proj.weight"
    std::string gguf = gguf_name(name, ffn_norm);
    const size_t at = gguf.find("mlp.experts.");
    if (at == std::string::npos) {
      gathered[gguf] = {&tensor};
      continue;
    }
    const std::string rest = gguf.substr(at + 12);
    const auto expert = static_cast<size_t>(std::stoi(rest));
    const std::string matrix = rest.substr(rest.find('.') + 1, rest.find("_proj") - rest.find('.') - 1);
    auto& all = gathered[gguf.substr(0, at) + "ffn_" + matrix + "_exps.weight"];
    all.resize(std::max(all.size(), expert + 1));
    all[expert] = &tensor;
  }
  for (const auto& [name, parts] : gathered) {
    std::vector<uint64_t> dims(parts[0]->shape.rbegin(), parts[0]->shape.rend());
    if (name.find("_exps.") != std::string::npos && parts.size() > 1) dims.push_back(parts.size());
    uint32_t type = kGgufF32;
    std::string bytes;
    std::vector<float> scales, input_scales;
    for (const RecordedTensor* part : parts) {
      if (packing == Packing::kF32 || part->matrices.empty()) {
        bytes += bytes_of(part->values);
        continue;
      }
      for (const Matrix& matrix : part->matrices) {
        auto [part_type, part_bytes] = blocks_of(matrix);
        type = part_type;
        bytes += part_bytes;
        scales.push_back(matrix.tensor_scale);
        input_scales.push_back(matrix.input_scale);
      }
    }
    writer.tensor(name, dims, type, bytes);
    if (type == kGgufNvfp4) {
      const std::string base = name.substr(0, name.size() - std::string("weight").size());
      writer.tensor(base + "scale", {scales.size()}, kGgufF32, bytes_of(scales));
      writer.tensor(base + "input_scale", {scales.size()}, kGgufF32, bytes_of(input_scales));
    }
  }
}

inline std::unique_ptr<WeightSource> open_safetensors(const std::string& bytes) {
  FaultyFileSystem files;
  files.add_file("m/model.safetensors", bytes);
  auto checkpoint = Checkpoint::open(files, "m");
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  return std::make_unique<Checkpoint>(std::move(checkpoint).value());
}

inline std::shared_ptr<Gguf> open_gguf(const GgufWriter& writer) {
  FaultyFileSystem files;
  files.add_file("m.gguf", writer.file());
  auto gguf = Gguf::open(files, "m.gguf");
  EXPECT_TRUE(gguf.ok()) << gguf.status().message();
  return std::make_shared<Gguf>(std::move(gguf).value());
}

}  // namespace nibble
