// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1), always in its absorbed form: kv_b's key
// half is folded into the query and its value half into the output, so that the cache of one latent a
// position is never expanded and a prompt's rows get the bits that decoding gives.
#include "model/mixers.h"

namespace nibble {
namespace {

enum Scratch : size_t {
  kQueryLatent,   // [T, q_rank]
  kQuery,         // [T, H * (nope + rope)]
  kLatent,        // [T, kv_rank + rope]
  kAbsorbed,      // [T, H * (kv_rank + rope)]
  kAttended,      // [T, H * kv_rank]
  kHeads,         // [T, H * value_dim]
  kIndexQuery,    // [T, index heads * index dim]
  kIndexKey,      // [T, index dim]
  kIndexGate,     // [T, index dim]
  kIndexWeights,  // [T, index heads]
};

// The columns from `first` of a view, as a view of `cols`.
Rows<float> columns(const Rows<float>& x, int64_t first, int64_t cols) {
  return {x.data + first, x.rows, cols, x.stride};
}

// From the indexer's products of act.normed, which stand in their scratch.
void select(Step& step, const LayerCache& cache, const IndexerSpec& spec, const IndexerWeights& weights,
            Rows<const float> query_latent) {
  constexpr float kLayerNormEps = 1e-6f;
  Ops& ops = step.ops;
  Activations& act = step.act;
  const Rows<float> query = narrow(act.mixer[kIndexQuery], spec.query_width());
  const Rows<float> key = narrow(act.mixer[kIndexKey], spec.head_dim);
  const Rows<float> gate = narrow(act.mixer[kIndexGate], spec.head_dim);
  const Rows<float> head_weights = narrow(act.mixer[kIndexWeights], spec.heads);
  ops.linear(query_latent, weights.query, query);
  ops.layer_norm(key, weights.key_norm, weights.key_norm_bias, kLayerNormEps, key);
  const KvView kv = step.kv.view(cache.kv[1]);
  ops.write_kv(key, gate, step.rows, kv);
  // The factor heads^-0.5 on the head weights scales all scores alike and changes no choice.
  ops.index_select({.q = query,
                    .weights = head_weights,
                    .kv = kv,
                    .ape = weights.ape,
                    .pool = spec.pool,
                    .top_k = spec.top_k,
                    .rows = step.rows,
                    .out = {.positions = act.selected, .counts = act.selected_counts.data}});
}

}  // namespace

std::vector<int64_t> mla_scratch(const MlaSpec& spec) {
  const IndexerSpec indexer = spec.indexer.value_or(IndexerSpec{});
  return {spec.q_rank,
          spec.heads * spec.query_dim(),
          spec.latent_dim(),
          spec.heads * spec.latent_dim(),
          spec.heads * spec.kv_rank,
          spec.heads * spec.value_dim,
          indexer.query_width(),
          indexer.head_dim,
          indexer.head_dim,
          indexer.heads};
}

void mla(Step& step, const LayerCache& cache, const MlaSpec& spec, const MlaWeights& weights) {
  Ops& ops = step.ops;
  Activations& act = step.act;
  const float eps = step.spec.norm_eps;
  Rows<float> query_latent = narrow(act.mixer[kQueryLatent], spec.q_rank);
  Rows<float> query = narrow(act.mixer[kQuery], spec.heads * spec.query_dim());
  Rows<float> latent = narrow(act.mixer[kLatent], spec.latent_dim());
  Rows<float> absorbed = narrow(act.mixer[kAbsorbed], spec.heads * spec.latent_dim());
  Rows<float> attended = narrow(act.mixer[kAttended], spec.heads * spec.kv_rank);
  Rows<float> heads = narrow(act.mixer[kHeads], spec.heads * spec.value_dim);

  std::vector<Product> products = {{weights.latent, nullptr, latent}};
  if (spec.q_rank > 0) {
    products.push_back({weights.query_down, nullptr, query_latent});
  } else {
    products.push_back({weights.query_up, nullptr, query});
  }
  if (spec.indexer) {
    const IndexerSpec& indexer = *spec.indexer;
    products.push_back({weights.indexer.key, nullptr, narrow(act.mixer[kIndexKey], indexer.head_dim)});
    products.push_back({weights.indexer.gate, nullptr, narrow(act.mixer[kIndexGate], indexer.head_dim)});
    products.push_back(
        {weights.indexer.head_weights, nullptr, narrow(act.mixer[kIndexWeights], indexer.heads)});
  }
  input_products(step, products);
  if (spec.q_rank > 0) {
    const Product query_up[] = {{weights.query_up, nullptr, query}};
    ops.norm_linears(query_latent, weights.query_norm, eps, query_latent, query_up);
  }
  Rows<float> content = columns(latent, 0, spec.kv_rank);
  ops.rms_norm(content, weights.latent_norm, eps, content);
  if (spec.rope_dim > 0) {
    ops.rope(query, spec.query_dim(), act.ropes[spec.rope], spec.rope_style, spec.nope_dim);
    ops.rope(latent, spec.latent_dim(), act.ropes[spec.rope], spec.rope_style, spec.kv_rank);
    for (int64_t h = 0; h < spec.heads; ++h) {
      ops.copy(columns(query, h * spec.query_dim() + spec.nope_dim, spec.rope_dim),
               columns(absorbed, h * spec.latent_dim() + spec.kv_rank, spec.rope_dim));
    }
  }
  ops.linear_heads(query, spec.query_dim(), weights.key_absorb_H, absorbed, spec.latent_dim());

  const KvView kv = step.kv.view(cache.kv[0]);
  ops.write_kv(latent, content, step.rows, kv);
  const AttendArgs attend = {
      .q = absorbed, .kv = kv, .rows = step.rows, .scale = spec.scale, .out = attended};
  if (spec.indexer) select(step, cache, *spec.indexer, weights.indexer, query_latent);
  if (spec.indexer || spec.shares_selection) {
    ops.attend_selected(attend, {.positions = act.selected, .counts = act.selected_counts.data});
  } else {
    ops.attend(attend);
  }
  ops.linear_heads(attended, spec.kv_rank, weights.value_up_H, heads, spec.value_dim);
  output(step, heads, weights.output);
}

}  // namespace nibble
