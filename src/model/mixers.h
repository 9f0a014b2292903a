// The token mixers: what a layer does across positions. One file each; all have this form:
// a sublayer from step.input to step.add_to or act.sublayer, with keys, values or states going to the KV
// cache.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "model/step.h"
#include "model/weights.h"

namespace nibble {

// Whichever of these the layer has.
void mix(Step& step, const LayerCache& cache, const MixerSpec& spec, const MixerWeights& weights);

void gqa(Step& step, const LayerCache& cache, const GqaSpec& spec, const GqaWeights& weights);
void mla(Step& step, const LayerCache& cache, const MlaSpec& spec, const MlaWeights& weights);
void kda(Step& step, const LayerCache& cache, const KdaSpec& spec, const KdaWeights& weights);

// Widths of the scratch views (Activations::mixer) that a mixer uses, by its own numbering.
std::vector<int64_t> gqa_scratch(const GqaSpec& spec);
std::vector<int64_t> mla_scratch(const MlaSpec& spec);
std::vector<int64_t> kda_scratch(const KdaSpec& spec);
std::vector<int64_t> mixer_scratch(const MixerSpec& spec);

// What a mixer keeps for a sequence: layers of the KV cache, and elements of float32 state.
struct MixerCacheShape {
  std::vector<KvLayerShape> kv;
  std::vector<int64_t> states;
};
MixerCacheShape mixer_cache(const MixerSpec& spec);

// The shape of its attention, as if to all positions; nothing where it has none.
std::optional<StepShape::Attention> mixer_attention(const MixerSpec& spec);

// RMSNorm of each head of x on its own, in place.
void norm_heads(Step& step, Rows<float> x, int64_t head_dim, const float* weight);

}  // namespace nibble
