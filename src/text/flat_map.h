// A hash map from 64-bit keys to 64-bit values for tables that are built once and read often: one array,
// linear probing, no erase.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace nibble {

class FlatMap {
 public:
  // A later value for the same key wins. REQUIRES key != kNoKey.
  void insert_or_assign(uint64_t key, uint64_t value) {
    NIBBLE_CHECK(key != kNoKey);
    if (2 * (size_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[place(key)];
    if (slot.key == kNoKey) ++size_;
    slot = {key, value};
  }

  // The value, valid until the next insert; null where there is none.
  const uint64_t* find(uint64_t key) const {
    if (slots_.empty()) return nullptr;
    const Slot& slot = slots_[place(key)];
    return slot.key == key ? &slot.value : nullptr;
  }

 private:
  static constexpr uint64_t kNoKey = ~uint64_t{0};
  struct Slot {
    uint64_t key = kNoKey;
    uint64_t value = 0;
  };

  // The slot that holds `key` or is free for it. At most half of the slots are taken, so that it ends soon.
  size_t place(uint64_t key) const {
    uint64_t hash = key * 0x9E3779B97F4A7C15U;  // 2^64 / golden ratio; then the good high bits go low
    hash ^= hash >> 32;
    hash *= 0xD6E8FEB86659FD93U;
    hash ^= hash >> 32;
    size_t at = hash & (slots_.size() - 1);
    while (slots_[at].key != kNoKey && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? 16 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.key != kNoKey) slots_[place(slot.key)] = slot;
    }
  }

  std::vector<Slot> slots_;  // a power of two
  size_t size_ = 0;
};

}  // namespace nibble
