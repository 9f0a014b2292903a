// The keys and values of all running sequences, in pages.
//
// Layers with the same window form a class and share one page pool and one page table: the class of full
// attention grows with a sequence; a class with a window has a short table that the sequence goes around in
// (a ring), so that its memory does not grow. A page holds `page_tokens` positions of all layers of its
// class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "kv/page_pool.h"
#include "ops/memory.h"
#include "ops/ops.h"

namespace nibble {

struct KvLayerShape {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;  // 0: head_dim
  int64_t window = 0;     // 0: full attention

  int64_t value_width() const { return value_dim > 0 ? value_dim : head_dim; }
};

struct KvOptions {
  int64_t max_sequences = 1;     // slots
  int64_t max_tokens = 4096;     // of one sequence
  int64_t pool_tokens = 0;       // of all sequences in the full class; 0: max_sequences * max_tokens
  int64_t max_new_tokens = 256;  // rows of one sequence in one step (the prefill chunk)
  int64_t page_tokens = 16;
};

class KvCache {
 public:
  // What create() would allocate.
  static Result<int64_t> plan_bytes(const std::vector<KvLayerShape>& layers,
                                    const std::vector<int64_t>& states, const KvOptions& options);
  // `states`: elements of float32 that each recurrent state has for a sequence.
  static Result<KvCache> create(Memory& memory, const std::vector<KvLayerShape>& layers,
                                const std::vector<int64_t>& states, const KvOptions& options);

  // A free slot for a new, empty sequence; an error when all are taken.
  Result<int32_t> add_sequence();
  // Gives the sequence's pages back.
  void remove_sequence(int32_t slot);
  struct Extension {
    int32_t slot;
    int64_t new_tokens;  // in [0, max_new_tokens]
  };
  // Makes room for more positions of several sequences; on error (out of pages, over max_tokens) nothing
  // changes. REQUIRES each sequence to be named once.
  Status extend(std::span<const Extension> extensions);
  // Positions that the sequence has.
  int64_t length(int32_t slot) const;

  // Makes `to`, an empty sequence, a copy of `from`: what it remembers, bit for bit. On error (out of pages)
  // nothing changes.
  Status copy_sequence(int32_t from, int32_t to);
  // All that a sequence remembers, as bytes; restore() REQUIRES an empty sequence of a cache of the same
  // shapes and options, and refuses other bytes.
  std::vector<std::byte> save(int32_t slot) const;
  Status restore(int32_t slot, std::span<const std::byte> saved);

  // A recurrent state, [max_sequences, elements].
  float* state(size_t index) const { return states_[index].buffer.as<float>(); }
  // The layer's pages as operations take them. Call after the step's extends.
  KvView view(size_t layer) const;

  int64_t free_tokens() const;  // that the full class still has pages for
  int64_t bytes() const;
  const KvOptions& options() const { return options_; }
  void check_integrity() const;

 private:
  // Layers with the same window.
  struct Class {
    int64_t window = 0;
    int64_t table_pages = 0;
    PagePool pool{0};
    std::vector<int32_t> table;  // host copy, [max_sequences, table_pages]
    Buffer device_table;
  };
  struct Layer {
    KvLayerShape shape;
    size_t kv_class = 0;
    Buffer keys, values;
  };
  struct State {
    int64_t elements = 0;
    Buffer buffer;
  };
  struct Sequence {
    bool used = false;
    int64_t length = 0;
  };
  // Calls visit(address, bytes) for every piece of memory that holds something of the sequence, in a fixed
  // order.
  template <class Visit>
  void each_piece(int32_t slot, Visit visit) const;
  Status grow(int32_t slot, int64_t tokens);
  void take_pages(Class& kv_class, const Extension& extension);
  int64_t pages_held(const Class& kv_class, int64_t length) const;
  static std::vector<Class> make_classes(const std::vector<KvLayerShape>& layers, const KvOptions& options);

  KvOptions options_;
  std::vector<Class> classes_;
  std::vector<Layer> layers_;
  std::vector<State> states_;
  std::vector<Sequence> sequences_;
};

}  // namespace nibble
