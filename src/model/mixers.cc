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

std::optional<StepShape::Attention> mixer_attention(const MixerSpec& spec) {
  const MixerCacheShape cache = mixer_cache(spec);
  if (cache.kv.empty()) return std::nullopt;
  const KvLayerShape& kv = cache.kv[0];
  const auto* gqa = std::get_if<GqaSpec>(&spec);
  return StepShape::Attention{.heads = gqa != nullptr ? gqa->heads : std::get<MlaSpec>(spec).heads,
                              .head_dim = kv.head_dim,
                              .value_dim = kv.value_dim,
                              .window = kv.window};
}

void norm_heads(Step& step, Rows<float> x, int64_t head_dim, const float* weight) {
  Rows<float> heads(x.data, x.rows * (x.cols / head_dim), head_dim);
  step.ops.rms_norm(heads, weight, step.spec.norm_eps, heads);
}

}  // namespace nibble
