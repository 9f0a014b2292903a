// The keys and values of all running sequences, in pages.
//
// Layers with the same window form a class and share one page pool and one page table: the class of full
// attention grows with a sequence; a class with a window has a short table that the sequence goes around in
// (a ring), so that its memory does not grow. A page holds `page_tokens` positions of all layers of its
// class.
#pragma once

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
  int64_t window = 0;  // 0: full attention
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
  static Result<int64_t> plan_bytes(const std::vector<KvLayerShape>& layers, const KvOptions& options);
  static Result<KvCache> create(Memory& memory, const std::vector<KvLayerShape>& layers,
                                const KvOptions& options);

  // A free slot for a new, empty sequence; an error when all are taken.
  Result<int32_t> add_sequence();
  // Gives the sequence's pages back.
  void remove_sequence(int32_t slot);
  struct Extension {
    int32_t slot;
    int64_t new_tokens;  // in [0, max_new_tokens]
  };
  // Makes room for more positions of several sequences, each named once; on error (out of pages, over
  // max_tokens) nothing changes.
  Status extend(std::span<const Extension> extensions);
  // Positions that the sequence has.
  int64_t length(int32_t slot) const;

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
  struct Sequence {
    bool used = false;
    int64_t length = 0;
  };
  void take_pages(Class& kv_class, const Extension& extension);
  int64_t pages_held(const Class& kv_class, int64_t length) const;
  static std::vector<Class> make_classes(const std::vector<KvLayerShape>& layers, const KvOptions& options);

  KvOptions options_;
  std::vector<Class> classes_;
  std::vector<Layer> layers_;
  std::vector<Sequence> sequences_;
};

}  // namespace nibble
