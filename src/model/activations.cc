#include "model/activations.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "base/numbers.h"
#include "model/mixers.h"

namespace nibble {
namespace {

struct Widths {
  std::vector<int64_t> mixer;
  int64_t selected = 0, ffn = 0, experts = 0, chosen = 0, expert = 0;
};

Widths widest(const ModelSpec& spec) {
  Widths w;
  for (const LayerSpec& layer : spec.layers) {
    const std::vector<int64_t> mixer = mixer_scratch(layer.mixer);
    w.mixer.resize(std::max(w.mixer.size(), mixer.size()), 0);
    for (size_t i = 0; i < mixer.size(); ++i) w.mixer[i] = std::max(w.mixer[i], mixer[i]);
    if (const auto* mla = std::get_if<MlaSpec>(&layer.mixer); mla != nullptr && mla->indexer) {
      w.selected = std::max(w.selected, mla->indexer->most_chosen());
    }
    w.ffn = std::max(w.ffn, layer.dense_width);
    if (!layer.moe) continue;
    w.ffn = std::max(w.ffn, layer.moe->shared_width);
    w.experts = std::max(w.experts, layer.moe->experts);
    w.chosen = std::max(w.chosen, layer.moe->chosen);
    w.expert = std::max(w.expert, layer.moe->width);
  }
  return w;
}

// Calls visit(view, rows, cols) for every view: the one list of what there is.
template <class Visit>
void each_view(Activations& a, const ModelSpec& spec, int64_t rows, int64_t logit_rows, Visit visit) {
  const Widths w = widest(spec);
  visit(a.residual, rows, spec.residual_width());
  if (spec.hyper) {
    visit(a.collected, rows, spec.width);
    visit(a.mix, rows, spec.hyper->mix_width());
    visit(a.normed_streams, rows, spec.residual_width());
  }
  for (Rows<float>* view : {&a.normed, &a.sublayer, &a.shared}) visit(*view, rows, spec.width);
  a.mixer.resize(w.mixer.size());
  for (size_t i = 0; i < w.mixer.size(); ++i) visit(a.mixer[i], rows, w.mixer[i]);
  visit(a.selected, rows, w.selected);
  visit(a.selected_counts, rows, 1);
  for (Rows<float>* view : {&a.ffn_gate, &a.ffn_up}) visit(*view, rows, w.ffn);
  visit(a.router_logits, rows, w.experts);
  visit(a.expert_ids, rows, w.chosen);
  visit(a.expert_weights, rows, w.chosen);
  for (Rows<float>* view : {&a.expert_gathered, &a.expert_down}) visit(*view, rows * w.chosen, spec.width);
  for (Rows<float>* view : {&a.expert_gate, &a.expert_up}) visit(*view, rows * w.chosen, w.expert);
  a.ropes.resize(spec.ropes.size());
  for (size_t i = 0; i < spec.ropes.size(); ++i) visit(a.ropes[i], rows, spec.ropes[i].rotary_dim);
  visit(a.indices, 3 * rows + logit_rows, 1);
  visit(a.logit_inputs, logit_rows, spec.residual_width());
  visit(a.logit_normed, logit_rows, spec.width);
  visit(a.logits, logit_rows, spec.vocab);
  visit(a.top_logits, logit_rows, std::min(spec.vocab, kTopLogits));
}

constexpr int64_t kAlign = 256;  // bytes; a cache line here, a memory transaction on a GPU

}  // namespace

Result<int64_t> ActivationMemory::plan_bytes(const ModelSpec& spec, int64_t max_rows,
                                             int64_t max_logit_rows) {
  Activations views;
  std::optional<int64_t> total = 0;
  each_view(views, spec, max_rows, max_logit_rows, [&](auto& view, int64_t rows, int64_t cols) {
    std::optional<int64_t> bytes = checked_product(std::array<int64_t, 3>{rows, cols, sizeof(*view.data)});
    if (bytes) bytes = checked_add(*bytes, kAlign);
    total = total && bytes ? checked_add(*total, *bytes) : std::nullopt;
  });
  if (!total)
    return user_error("activations of {} rows do not fit in 64 bits; ask for smaller chunks", max_rows);
  return *total;
}

Result<ActivationMemory> ActivationMemory::allocate(Memory& memory, const ModelSpec& spec, int64_t max_rows,
                                                    int64_t max_logit_rows) {
  NIBBLE_ASSIGN_OR_RETURN(int64_t bytes, plan_bytes(spec, max_rows, max_logit_rows));
  ActivationMemory result;
  NIBBLE_ASSIGN_OR_RETURN(result.buffer_, Buffer::allocate(memory, bytes, "activations"));
  result.max_rows_ = max_rows;
  result.max_logit_rows_ = max_logit_rows;
  char* next = result.buffer_.as<char>();
  each_view(result.views_, spec, max_rows, max_logit_rows, [&](auto& view, int64_t rows, int64_t cols) {
    using Element = std::remove_reference_t<decltype(*view.data)>;
    view = {reinterpret_cast<Element*>(next), rows, cols};
    next += round_up(rows * cols * static_cast<int64_t>(sizeof(Element)), kAlign);
  });
  return result;
}

Activations ActivationMemory::views(const ModelSpec& spec, int64_t rows, int64_t logit_rows) const {
  NIBBLE_CHECK(rows <= max_rows_ && logit_rows <= max_logit_rows_);
  Activations a = views_;
  each_view(a, spec, rows, logit_rows, [](auto& view, int64_t view_rows, int64_t) { view.rows = view_rows; });
  return a;
}

}  // namespace nibble
