#include "model/mixers.h"

namespace nibble {

void mix(Step& step, const LayerCache& cache, const MixerSpec& spec, const MixerWeights& weights) {
  if (const auto* s = std::get_if<GqaSpec>(&spec)) return gqa(step, cache, *s, std::get<GqaWeights>(weights));
  if (const auto* s = std::get_if<MlaSpec>(&spec)) return mla(step, cache, *s, std::get<MlaWeights>(weights));
  kda(step, cache, std::get<KdaSpec>(spec), std::get<KdaWeights>(weights));
}

std::vector<int64_t> mixer_scratch(const MixerSpec& spec) {
  if (const auto* gqa = std::get_if<GqaSpec>(&spec)) return gqa_scratch(*gqa);
  if (const auto* mla = std::get_if<MlaSpec>(&spec)) return mla_scratch(*mla);
  return kda_scratch(std::get<KdaSpec>(spec));
}

MixerCacheShape mixer_cache(const MixerSpec& spec) {
  if (const auto* gqa = std::get_if<GqaSpec>(&spec)) {
    return {.kv = {{.kv_heads = gqa->kv_heads, .head_dim = gqa->head_dim, .window = gqa->window}},
            .states = {}};
  }
  if (const auto* mla = std::get_if<MlaSpec>(&spec)) {
    // Keys are the whole latent, values its part without position.
    MixerCacheShape shape = {
        .kv = {{.kv_heads = 1, .head_dim = mla->latent_dim(), .value_dim = mla->kv_rank}}, .states = {}};
    if (mla->indexer) shape.kv.push_back({.kv_heads = 1, .head_dim = mla->indexer->head_dim});
    return shape;
  }
  const auto& kda = std::get<KdaSpec>(spec);
  const int64_t conv = (kda.taps - 1) * kda.width();
  return {.kv = {}, .states = {conv, conv, conv, kda.heads * kda.head_dim * kda.head_dim}};
}

void norm_heads(Step& step, Rows<float> x, int64_t head_dim, const float* weight) {
  Rows<float> heads(x.data, x.rows * (x.cols / head_dim), head_dim);
  step.ops.rms_norm(heads, weight, step.spec.norm_eps, heads);
}

}  // namespace nibble
