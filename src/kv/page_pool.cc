#include "kv/page_pool.h"

#include "base/check.h"

namespace nibble {

PagePool::PagePool(int32_t pages) : used_(static_cast<size_t>(pages), false) {
  for (int32_t page = pages - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagePool::take() {
  NIBBLE_CHECK(!free_.empty());
  int32_t page = free_.back();
  free_.pop_back();
  used_[static_cast<size_t>(page)] = true;
  return page;
}

void PagePool::give_back(int32_t page) {
  NIBBLE_CHECK(page >= 0 && page < pages() && used_[static_cast<size_t>(page)]);
  used_[static_cast<size_t>(page)] = false;
  free_.push_back(page);
}

void PagePool::check_integrity() const {
  std::vector<bool> seen = used_;
  for (int32_t page : free_) {
    NIBBLE_CHECK(page >= 0 && page < pages() && !seen[static_cast<size_t>(page)]);
    seen[static_cast<size_t>(page)] = true;
  }
  for (bool s : seen) NIBBLE_CHECK(s);
}

}  // namespace nibble
