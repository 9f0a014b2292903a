#include "kv/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "base/numbers.h"

namespace nibble {

std::vector<KvCache::Class> KvCache::make_classes(const std::vector<KvLayerShape>& layers,
                                                  const KvOptions& options) {
  std::vector<Class> classes;
  const int64_t full_pages = ceil_div(options.max_tokens, options.page_tokens);
  for (const KvLayerShape& shape : layers) {
    bool known =
        std::any_of(classes.begin(), classes.end(), [&](const Class& c) { return c.window == shape.window; });
    if (known) continue;
    Class kv_class;
    kv_class.window = shape.window;
    kv_class.table_pages = full_pages;
    int64_t pages = ceil_div(options.pool_tokens, options.page_tokens);
    if (shape.window > 0) {
      // A step's first row looks window - 1 positions back while its last row is written: that span must not
      // meet itself, wherever in a page it starts.
      int64_t span = shape.window - 1 + options.max_new_tokens;
      kv_class.table_pages = std::min(full_pages, ceil_div(span, options.page_tokens) + 1);
      pages = kv_class.table_pages * options.max_sequences;
    }
    kv_class.pool = PagePool(static_cast<int32_t>(pages));
    kv_class.table.assign(static_cast<size_t>(options.max_sequences * kv_class.table_pages), 0);
    classes.push_back(std::move(kv_class));
  }
  return classes;
}

namespace {

// Fills in pool_tokens, bounds everything.
Result<KvOptions> complete(KvOptions options) {
  constexpr int64_t kMost = INT64_C(1) << 30;  // positions and pages are int32 in the tables
  for (int64_t value :
       {options.max_sequences, options.max_tokens, options.max_new_tokens, options.page_tokens}) {
    if (value < 1 || value > kMost)
      return user_error("KV cache: wanted sizes in [1, {}], found {}", kMost, value);
  }
  std::optional<int64_t> tables =
      checked_mul(options.max_sequences, ceil_div(options.max_tokens, options.page_tokens));
  if (!tables || *tables > kMost) {
    return user_error("KV cache: {} sequences of {} tokens are more than {} pages", options.max_sequences,
                      options.max_tokens, kMost);
  }
  if (options.pool_tokens == 0) {
    // Each sequence may waste most of a page at its end.
    std::optional<int64_t> tokens =
        checked_mul(options.max_sequences, round_up(options.max_tokens, options.page_tokens));
    options.pool_tokens = tokens.value_or(kMost + 1);
  }
  if (options.pool_tokens < 1 || options.pool_tokens > kMost) {
    return user_error("KV cache: wanted room for at most {} tokens in all, found {}", kMost,
                      options.pool_tokens);
  }
  return options;
}

}  // namespace

Result<int64_t> KvCache::plan_bytes(const std::vector<KvLayerShape>& layers,
                                    const std::vector<int64_t>& states, const KvOptions& asked) {
  NIBBLE_ASSIGN_OR_RETURN(KvOptions options, complete(asked));
  const std::vector<Class> classes = make_classes(layers, options);
  std::optional<int64_t> total = 0;
  auto count = [&](std::initializer_list<int64_t> dims) {
    std::optional<int64_t> elements = checked_product(std::span(dims.begin(), dims.size()));
    std::optional<int64_t> bytes = elements ? checked_mul(*elements, sizeof(float)) : std::nullopt;
    total = total && bytes ? checked_add(*total, *bytes) : std::nullopt;
  };
  for (const KvLayerShape& shape : layers) {
    auto kv_class = std::find_if(classes.begin(), classes.end(),
                                 [&](const Class& c) { return c.window == shape.window; });
    count({kv_class->pool.pages(), options.page_tokens, shape.kv_heads, shape.head_dim});
    count({kv_class->pool.pages(), options.page_tokens, shape.kv_heads, shape.value_width()});
  }
  for (int64_t elements : states) count({options.max_sequences, elements});
  if (!total)
    return user_error("KV cache: its size does not fit in 64 bits; ask for fewer sequences or tokens");
  return *total;
}

Result<KvCache> KvCache::create(Memory& memory, const std::vector<KvLayerShape>& layers,
                                const std::vector<int64_t>& states, const KvOptions& asked) {
  KvCache cache;
  NIBBLE_ASSIGN_OR_RETURN(cache.options_, complete(asked));
  NIBBLE_RETURN_IF_ERROR(plan_bytes(layers, states, asked).status());
  cache.classes_ = make_classes(layers, cache.options_);
  cache.sequences_.resize(static_cast<size_t>(cache.options_.max_sequences));
  for (Class& kv_class : cache.classes_) {
    NIBBLE_ASSIGN_OR_RETURN(
        kv_class.device_table,
        Buffer::allocate(memory, static_cast<int64_t>(kv_class.table.size() * sizeof(int32_t)),
                         "KV page table"));
  }
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  for (const KvLayerShape& shape : layers) {
    Layer layer;
    layer.shape = shape;
    while (cache.classes_[layer.kv_class].window != shape.window) ++layer.kv_class;
    const int64_t tokens =
        cache.classes_[layer.kv_class].pool.pages() * cache.options_.page_tokens * shape.kv_heads;
    NIBBLE_ASSIGN_OR_RETURN(layer.keys,
                            Buffer::allocate(memory, tokens * shape.head_dim * kFloat, "KV cache (keys)"));
    NIBBLE_ASSIGN_OR_RETURN(
        layer.values, Buffer::allocate(memory, tokens * shape.value_width() * kFloat, "KV cache (values)"));
    cache.layers_.push_back(std::move(layer));
  }
  for (int64_t elements : states) {
    State state{.elements = elements, .buffer = {}};
    NIBBLE_ASSIGN_OR_RETURN(
        state.buffer,
        Buffer::allocate(memory, cache.options_.max_sequences * elements * kFloat, "recurrent state"));
    cache.states_.push_back(std::move(state));
  }
  return cache;
}

int64_t KvCache::pages_held(const Class& kv_class, int64_t length) const {
  return std::min(ceil_div(length, options_.page_tokens), kv_class.table_pages);
}

Result<int32_t> KvCache::add_sequence() {
  for (size_t slot = 0; slot < sequences_.size(); ++slot) {
    if (sequences_[slot].used) continue;
    sequences_[slot] = {.used = true, .length = 0};
    for (State& state : states_) {
      const std::vector<float> zeros(static_cast<size_t>(state.elements), 0.0f);
      state.buffer.memory().upload(state.buffer.as<float>() + static_cast<int64_t>(slot) * state.elements,
                                   zeros.data(), state.elements * static_cast<int64_t>(sizeof(float)));
    }
    return static_cast<int32_t>(slot);
  }
  return user_error("KV cache: all {} sequence slots are taken", sequences_.size());
}

void KvCache::remove_sequence(int32_t slot) {
  Sequence& sequence = sequences_[static_cast<size_t>(slot)];
  NIBBLE_CHECK(sequence.used);
  for (Class& kv_class : classes_) {
    for (int64_t i = 0; i < pages_held(kv_class, sequence.length); ++i) {
      kv_class.pool.give_back(kv_class.table[static_cast<size_t>(slot * kv_class.table_pages + i)]);
    }
  }
  sequence = {};
}

Status KvCache::extend(std::span<const Extension> extensions) {
  std::vector<int32_t> slots;
  for (const Extension& e : extensions) slots.push_back(e.slot);
  std::ranges::sort(slots);
  NIBBLE_CHECK(std::ranges::adjacent_find(slots) == slots.end());
  for (const Extension& e : extensions) {
    const Sequence& sequence = sequences_[static_cast<size_t>(e.slot)];
    NIBBLE_CHECK(sequence.used && e.new_tokens >= 0);
    if (e.new_tokens > options_.max_new_tokens) {
      return user_error("a step of {} tokens of one sequence is over its limit of {}", e.new_tokens,
                        options_.max_new_tokens);
    }
    if (sequence.length + e.new_tokens > options_.max_tokens) {
      return user_error("the sequence would have {} tokens, more than the context of {}",
                        sequence.length + e.new_tokens, options_.max_tokens);
    }
  }
  for (const Class& kv_class : classes_) {
    int64_t wanted = 0;
    for (const Extension& e : extensions) {
      wanted += pages_held(kv_class, length(e.slot) + e.new_tokens) - pages_held(kv_class, length(e.slot));
    }
    if (wanted > kv_class.pool.free_pages()) {
      return user_error("KV cache: {} more pages of {} tokens are needed, {} are free", wanted,
                        options_.page_tokens, kv_class.pool.free_pages());
    }
  }
  for (const Extension& e : extensions) {
    for (Class& kv_class : classes_) take_pages(kv_class, e);
    sequences_[static_cast<size_t>(e.slot)].length += e.new_tokens;
  }
  return {};
}

void KvCache::take_pages(Class& kv_class, const Extension& e) {
  const int64_t from = pages_held(kv_class, length(e.slot)),
                to = pages_held(kv_class, length(e.slot) + e.new_tokens);
  if (from == to) return;
  const int64_t first = e.slot * kv_class.table_pages + from;
  int32_t* entries = &kv_class.table[static_cast<size_t>(first)];
  for (int64_t i = 0; i < to - from; ++i) entries[i] = kv_class.pool.take();
  kv_class.device_table.memory().upload(kv_class.device_table.as<int32_t>() + first, entries,
                                        (to - from) * static_cast<int64_t>(sizeof(int32_t)));
}

template <class Visit>
void KvCache::each_piece(int32_t slot, Visit visit) const {
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  for (const Layer& layer : layers_) {
    const Class& kv_class = classes_[layer.kv_class];
    const int64_t tokens = options_.page_tokens * layer.shape.kv_heads;
    for (int64_t i = 0; i < pages_held(kv_class, length(slot)); ++i) {
      const int64_t page = kv_class.table[static_cast<size_t>(slot * kv_class.table_pages + i)];
      const int64_t key_elements = tokens * layer.shape.head_dim,
                    value_elements = tokens * layer.shape.value_width();
      visit(layer.keys.memory(), layer.keys.as<float>() + page * key_elements, key_elements * kFloat);
      visit(layer.values.memory(), layer.values.as<float>() + page * value_elements, value_elements * kFloat);
    }
  }
  for (const State& state : states_) {
    visit(state.buffer.memory(), state.buffer.as<float>() + slot * state.elements, state.elements * kFloat);
  }
}

std::vector<std::byte> KvCache::save(int32_t slot) const {
  const int64_t tokens = length(slot);
  std::vector<std::byte> saved(sizeof(tokens));
  std::memcpy(saved.data(), &tokens, sizeof(tokens));
  each_piece(slot, [&](Memory& memory, const float* address, int64_t bytes) {
    saved.resize(saved.size() + static_cast<size_t>(bytes));
    memory.download(saved.data() + saved.size() - bytes, address, bytes);
  });
  return saved;
}

Status KvCache::restore(int32_t slot, std::span<const std::byte> saved) {
  NIBBLE_CHECK(sequences_[static_cast<size_t>(slot)].used && length(slot) == 0);
  int64_t tokens = 0;
  if (saved.size() < sizeof(tokens))
    return user_error("saved sequence: wanted at least {} bytes, found {}", sizeof(tokens), saved.size());
  std::memcpy(&tokens, saved.data(), sizeof(tokens));
  NIBBLE_RETURN_IF_ERROR(grow(slot, tokens));
  size_t wanted = sizeof(tokens);
  each_piece(slot, [&](Memory&, const float*, int64_t bytes) { wanted += static_cast<size_t>(bytes); });
  if (wanted != saved.size()) {
    remove_sequence(slot);
    sequences_[static_cast<size_t>(slot)].used = true;
    return user_error("saved sequence of {} tokens: wanted {} bytes, found {}", tokens, wanted, saved.size());
  }
  const std::byte* next = saved.data() + sizeof(tokens);
  each_piece(slot, [&](Memory& memory, float* address, int64_t bytes) {
    memory.upload(address, next, bytes);
    next += bytes;
  });
  return {};
}

Status KvCache::copy_sequence(int32_t from, int32_t to) { return restore(to, save(from)); }

// extend() beyond one step's limit; all or nothing.
Status KvCache::grow(int32_t slot, int64_t tokens) {
  if (tokens < 0 || tokens > options_.max_tokens) {
    return user_error("saved sequence: wanted at most {} tokens, found {}", options_.max_tokens, tokens);
  }
  while (length(slot) < tokens) {
    const Extension extension{slot, std::min(options_.max_new_tokens, tokens - length(slot))};
    if (Status status = extend(std::span(&extension, 1)); !status.ok()) {
      remove_sequence(slot);
      sequences_[static_cast<size_t>(slot)].used = true;
      return status;
    }
  }
  return {};
}

int64_t KvCache::length(int32_t slot) const { return sequences_[static_cast<size_t>(slot)].length; }

KvView KvCache::view(size_t index) const {
  const Layer& layer = layers_[index];
  const Class& kv_class = classes_[layer.kv_class];
  return {.keys = layer.keys.as<float>(),
          .values = layer.values.as<float>(),
          .kv_heads = layer.shape.kv_heads,
          .head_dim = layer.shape.head_dim,
          .page_tokens = options_.page_tokens,
          .table_pages = kv_class.table_pages,
          .table = kv_class.device_table.as<int32_t>(),
          .value_dim = layer.shape.value_dim};
}

int64_t KvCache::free_tokens() const {
  for (const Class& kv_class : classes_) {
    if (kv_class.window == 0) return kv_class.pool.free_pages() * options_.page_tokens;
  }
  return INT64_MAX;
}

int64_t KvCache::bytes() const {
  int64_t total = 0;
  for (const Layer& layer : layers_) total += layer.keys.bytes() + layer.values.bytes();
  for (const State& state : states_) total += state.buffer.bytes();
  return total;
}

void KvCache::check_integrity() const {
  for (const Class& kv_class : classes_) {
    kv_class.pool.check_integrity();
    int64_t held = 0;
    std::vector<bool> seen(static_cast<size_t>(kv_class.pool.pages()), false);
    for (size_t slot = 0; slot < sequences_.size(); ++slot) {
      int64_t pages = sequences_[slot].used ? pages_held(kv_class, sequences_[slot].length) : 0;
      for (int64_t i = 0; i < pages; ++i) {
        auto page = static_cast<size_t>(
            kv_class.table[slot * static_cast<size_t>(kv_class.table_pages) + static_cast<size_t>(i)]);
        NIBBLE_CHECK(page < seen.size() && !seen[page]);
        seen[page] = true;
      }
      held += pages;
    }
    NIBBLE_CHECK(held + kv_class.pool.free_pages() == kv_class.pool.pages());
  }
}

}  // namespace nibble
