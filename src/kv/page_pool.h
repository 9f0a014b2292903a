// Which pages of a KV pool are free: plain bookkeeping, no tensor.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"

namespace nibble {

class PagePool {
 public:
  // REQUIRES pages >= 0.
  explicit PagePool(int32_t pages);

  int32_t pages() const { return static_cast<int32_t>(used_.size()); }
  int32_t free_pages() const { return static_cast<int32_t>(free_.size()); }

  // Takes a page. REQUIRES free_pages() > 0.
  int32_t take();
  // REQUIRES that `page` was taken.
  void give_back(int32_t page);

  // Every page is either free once or used; CHECKs.
  void check_integrity() const;

 private:
  std::vector<int32_t> free_;  // a stack; the lowest page is taken first at the start
  std::vector<bool> used_;
};

}  // namespace nibble
