// Any bytes as config.json: no crash, no hang, no large allocation, only errors of one line; where a family
// takes it, a model that can be planned and that no operation would refuse by a check of its own.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <variant>

#include "base/check.h"
#include "model/decoder.h"
#include "model/limits.h"
#include "model/rope.h"
#include "model/spec.h"

namespace nibble {
namespace {

void expect_sane(const Status& status) {
  NIBBLE_CHECK(status.ok() || status.code() == ErrorCode::kUser);
  NIBBLE_CHECK(status.message().find('\n') == std::string::npos);
}

void check_rope(const ModelSpec& spec, size_t rope, int64_t rotated_of) {
  NIBBLE_CHECK(rope < spec.ropes.size() && spec.ropes[rope].rotary_dim <= rotated_of);
}

void check(const ModelSpec& spec, const GqaSpec& gqa) {
  NIBBLE_CHECK(gqa.heads > 0 && gqa.kv_heads > 0 && gqa.heads % gqa.kv_heads == 0 && gqa.window >= 0);
  NIBBLE_CHECK(gqa.head_dim > 0 && gqa.head_dim <= limits::kHeadDim);
  check_rope(spec, gqa.rope, gqa.head_dim);
}

void check(const ModelSpec& spec, const MlaSpec& mla) {
  NIBBLE_CHECK(mla.heads > 0 && mla.kv_rank > 0 && mla.nope_dim > 0 && mla.value_dim > 0);
  NIBBLE_CHECK(mla.latent_dim() <= limits::kHeadDim && std::isfinite(mla.scale));
  if (mla.rope_dim > 0) check_rope(spec, mla.rope, mla.rope_dim);
  if (!mla.indexer) return;
  NIBBLE_CHECK(mla.q_rank > 0 && mla.indexer->pool > 0 && mla.indexer->top_k > 0);
  NIBBLE_CHECK(mla.indexer->top_k % mla.indexer->pool == 0);
}

void check(const ModelSpec&, const KdaSpec& kda) {
  NIBBLE_CHECK(kda.heads > 0 && kda.head_dim > 0 && kda.taps >= 2);
}

void check(const MoeSpec& moe) {
  const RouterSpec& router = moe.router;
  NIBBLE_CHECK(moe.experts > 0 && moe.chosen > 0 && moe.width > 0 && moe.shared_width >= 0);
  NIBBLE_CHECK(router.n_group > 0 && moe.experts % router.n_group == 0);
  NIBBLE_CHECK(router.topk_group > 0 && router.topk_group <= router.n_group);
  NIBBLE_CHECK(moe.chosen <= moe.experts / router.n_group * router.topk_group);
}

void check(const ModelSpec& spec) {
  NIBBLE_CHECK(spec.width > 0 && spec.vocab > 0 && !spec.layers.empty());
  NIBBLE_CHECK(spec.activation.kind == ActivationSpec::kSilu || spec.activation.limit > 0);
  for (int32_t id : spec.eos) NIBBLE_CHECK(id >= 0 && id < spec.vocab);
  for (const LayerSpec& layer : spec.layers) {
    std::visit([&](const auto& mixer) { check(spec, mixer); }, layer.mixer);
    NIBBLE_CHECK(layer.moe.has_value() != (layer.dense_width > 0));
    if (layer.moe) check(*layer.moe);
  }
  for (const RopeSpec& rope : spec.ropes) {
    NIBBLE_CHECK(rope.rotary_dim >= 2 && rope.rotary_dim % 2 == 0);
    const RopeFrequencies frequencies = rope_frequencies(rope);
    NIBBLE_CHECK(std::isfinite(frequencies.attention_factor));
    NIBBLE_CHECK(
        std::ranges::all_of(frequencies.inv_freq, [](float f) { return std::isfinite(f) && f >= 0; }));
  }
}

}  // namespace
}  // namespace nibble

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble;
  Result<ModelSpec> spec = parse_spec({reinterpret_cast<const char*>(data), size}, "config.json");
  expect_sane(spec.status());
  if (!spec.ok()) return 0;
  check(*spec);
  for (const DecoderOptions& options :
       {DecoderOptions{.kv = {.max_sequences = 1, .max_tokens = 16, .max_new_tokens = 4}, .max_rows = 4},
        DecoderOptions{
            .kv = {.max_sequences = 1024, .max_tokens = limits::kPositions, .max_new_tokens = 1 << 20},
           .max_rows = 1 << 20}})
    expect_sane(Decoder::plan_bytes(*spec, options).status());
  return 0;
}
