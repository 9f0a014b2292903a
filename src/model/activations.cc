#include "model/activations.h"

#include <algorithm>
#include <array>

#include "base/numbers.h"

namespace nibble {
namespace {

struct Widths {
  int64_t query = 0, kv = 0, gate = 0, ffn = 0, experts = 0, chosen = 0, expert = 0;
};

Widths widest(const ModelSpec& spec) {
  Widths w;
  for (const LayerSpec& layer : spec.layers) {
    w.query = std::max(w.query, layer.attention.query_width());
    w.kv = std::max(w.kv, layer.attention.kv_width());
    w.gate = std::max(w.gate, layer.attention.gate_width());
    w.ffn = std::max(w.ffn, layer.dense_width);
    if (!layer.moe) continue;
    w.ffn = std::max(w.ffn, layer.moe->shared_width);
    w.experts = std::max(w.experts, layer.moe->experts);
    w.chosen = std::max(w.chosen, layer.moe->chosen);
    w.expert = std::max(w.expert, layer.moe->width);
  }
  return w;
}

// Calls cut(view, rows, cols) for every view: the one list of what there is.
template <class Cut>
void each_view(Activations& a, const ModelSpec& spec, int64_t rows, int64_t logit_rows, Cut cut) {
  const Widths w = widest(spec);
  for (Rows<float>* view : {&a.residual, &a.normed, &a.sublayer, &a.shared}) cut(*view, rows, spec.width);
  for (Rows<float>* view : {&a.query, &a.attended}) cut(*view, rows, w.query);
  for (Rows<float>* view : {&a.key, &a.value}) cut(*view, rows, w.kv);
  cut(a.output_gate, rows, w.gate);
  for (Rows<float>* view : {&a.ffn_gate, &a.ffn_up}) cut(*view, rows, w.ffn);
  cut(a.router_logits, rows, w.experts);
  cut(a.expert_ids, rows, w.chosen);
  cut(a.expert_weights, rows, w.chosen);
  for (Rows<float>* view : {&a.expert_gathered, &a.expert_down}) cut(*view, rows * w.chosen, spec.width);
  for (Rows<float>* view : {&a.expert_gate, &a.expert_up}) cut(*view, rows * w.chosen, w.expert);
  a.ropes.resize(spec.ropes.size());
  for (size_t i = 0; i < spec.ropes.size(); ++i) cut(a.ropes[i], rows, spec.ropes[i].rotary_dim);
  for (Rows<int32_t>* view : {&a.ids, &a.positions, &a.slots}) cut(*view, rows, 1);
  cut(a.logit_inputs, logit_rows, spec.width);
  cut(a.logits, logit_rows, spec.vocab);
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
  result.max_chosen_ = widest(spec).chosen;
  char* next = result.buffer_.as<char>();
  each_view(result.views_, spec, max_rows, max_logit_rows, [&](auto& view, int64_t rows, int64_t cols) {
    using Element = std::remove_reference_t<decltype(*view.data)>;
    view = {reinterpret_cast<Element*>(next), rows, cols};
    next += round_up(rows * cols * static_cast<int64_t>(sizeof(Element)), kAlign);
  });
  return result;
}

Activations ActivationMemory::views(int64_t rows, int64_t logit_rows) const {
  NIBBLE_CHECK(rows <= max_rows_ && logit_rows <= max_logit_rows_);
  Activations a = views_;
  for (Rows<float>* view :
       {&a.residual, &a.normed, &a.sublayer, &a.shared, &a.query, &a.attended, &a.key, &a.value,
        &a.output_gate, &a.ffn_gate, &a.ffn_up, &a.router_logits, &a.expert_weights}) {
    view->rows = rows;
  }
  for (Rows<float>* view : {&a.expert_gathered, &a.expert_down, &a.expert_gate, &a.expert_up}) {
    view->rows = rows * max_chosen_;
  }
  for (Rows<float>& view : a.ropes) view.rows = rows;
  for (Rows<int32_t>* view : {&a.expert_ids, &a.ids, &a.positions, &a.slots}) view->rows = rows;
  for (Rows<float>* view : {&a.logit_inputs, &a.logits}) view->rows = logit_rows;
  return a;
}

}  // namespace nibble
