#include "model/synthetic_tensors.h"

#include <utility>

namespace nibble {
namespace {

class Contents {
 public:
  Contents(const ModelSpec& spec, MatrixFormat experts) : spec_(spec), experts_(experts) {}

  std::vector<SyntheticTensor> list() {
    const TensorNames& names = spec_.names;
    matrix(names.embedding, spec_.vocab, spec_.width);
    matrix(names.head, spec_.vocab, spec_.width);
    vector(names.final_norm, {spec_.width});
    for (size_t i = 0; i < spec_.layers.size(); ++i) {
      prefix_ = names.layers + std::to_string(i) + ".";
      vector(names.input_norm, {spec_.width});
      vector(names.ffn_norm, {spec_.width});
      if (spec_.hyper) {
        for (const char* at : {"hc_attn_", "hc_ffn_"}) hyper(at, spec_.hyper->mix_width());
      }
      std::visit([&](const auto& mixer) { list_mixer(mixer); }, spec_.layers[i].mixer);
      if (spec_.layers[i].moe) {
        moe(*spec_.layers[i].moe);
      } else {
        glu(names.mlp, spec_.layers[i].dense_width, MatrixFormat::kBF16);
      }
    }
    return std::move(tensors_);
  }

 private:
  void matrix(const std::string& name, int64_t n, int64_t k, MatrixFormat format = MatrixFormat::kBF16) {
    tensors_.push_back({prefix_ + name, {n, k}, format});
  }
  void vector(const std::string& name, std::vector<int64_t> shape) {
    tensors_.push_back({prefix_ + name, std::move(shape)});
  }
  void glu(const std::string& at, int64_t width, MatrixFormat format) {
    matrix(at + spec_.names.gate_proj, width, spec_.width, format);
    matrix(at + spec_.names.up_proj, width, spec_.width, format);
    matrix(at + spec_.names.down_proj, spec_.width, width, format);
  }
  void hyper(const std::string& at, int64_t mix) {
    vector(at + "fn", {mix, spec_.residual_width()});
    vector(at + "base", {mix});
    vector(at + "scale", {3});
  }

  void list_mixer(const GqaSpec& gqa) {
    const std::string& at = spec_.names.attention;
    matrix(at + "q_proj", gqa.query_width(), spec_.width);
    matrix(at + "k_proj", gqa.kv_width(), spec_.width);
    matrix(at + "v_proj", gqa.kv_width(), spec_.width);
    matrix(at + "o_proj", spec_.width, gqa.query_width());
    if (gqa.output_gate != OutputGate::kNone) matrix(at + "g_proj", gqa.gate_width(), spec_.width);
    if (gqa.qk_norm == QkNorm::kNone) return;
    const bool full = gqa.qk_norm == QkNorm::kFull;
    vector(at + "q_norm.weight", {full ? gqa.query_width() : gqa.head_dim});
    vector(at + "k_norm.weight", {full ? gqa.kv_width() : gqa.head_dim});
  }

  void list_mixer(const MlaSpec& mla) {
    const std::string& at = spec_.names.attention;
    matrix(at + "q_a_proj", mla.q_rank, spec_.width);
    vector(at + "q_a_layernorm.weight", {mla.q_rank});
    matrix(at + "q_b_proj", mla.heads * mla.query_dim(), mla.q_rank);
    matrix(at + "kv_a_proj_with_mqa", mla.latent_dim(), spec_.width);
    vector(at + "kv_a_layernorm.weight", {mla.kv_rank});
    matrix(at + "kv_b_proj", mla.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank);
    matrix(at + "o_proj", spec_.width, mla.heads * mla.value_dim);
    if (!mla.indexer) return;
    const IndexerSpec& indexer = *mla.indexer;
    const std::string of = at + "indexer.";
    matrix(of + "wq_b", indexer.query_width(), mla.q_rank);
    matrix(of + "wk", indexer.head_dim, spec_.width);
    vector(of + "k_norm.weight", {indexer.head_dim});
    vector(of + "k_norm.bias", {indexer.head_dim});
    matrix(of + "weights_proj", indexer.heads, spec_.width);
    vector(of + "index_kpool_compress_ape", {indexer.pool, indexer.head_dim});
    vector(of + "index_kpool_compress_gate", {indexer.head_dim, spec_.width});
  }

  void list_mixer(const KdaSpec& kda) {
    const std::string& at = spec_.names.attention;
    const int64_t width = kda.width();
    for (const char* name : {"q", "k", "v"}) {
      matrix(at + name + "_proj", width, spec_.width);
      vector(at + name + "_conv1d.weight", {width, 1, kda.taps});
    }
    for (const char* name : {"f", "g"}) {
      matrix(at + name + "_a_proj", kda.head_dim, spec_.width);
      matrix(at + name + "_b_proj", width, kda.head_dim);
    }
    matrix(at + "b_proj", kda.heads, spec_.width);
    matrix(at + "o_proj", spec_.width, width);
    vector(at + "dt_bias", {width});
    vector(at + "A_log", {kda.heads});
    vector(at + "o_norm.weight", {kda.head_dim});
  }

  void moe(const MoeSpec& moe) {
    const TensorNames& names = spec_.names;
    matrix(names.router, moe.experts, spec_.width);
    vector(names.router_bias, {moe.experts});
    if (moe.shared_width > 0) glu(names.shared, moe.shared_width, MatrixFormat::kBF16);
    for (int64_t e = 0; e < moe.experts; ++e) {
      glu(names.experts + std::to_string(e) + ".", moe.width, experts_);
    }
  }

  const ModelSpec& spec_;
  MatrixFormat experts_;
  std::string prefix_;  // of the layer that is being listed
  std::vector<SyntheticTensor> tensors_;
};

}  // namespace

std::vector<SyntheticTensor> synthetic_tensors(const ModelSpec& spec, MatrixFormat experts) {
  return Contents(spec, experts).list();
}

}  // namespace nibble
