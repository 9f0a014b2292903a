#include "engine/scheduler.h"

#include <algorithm>

#include "base/check.h"

namespace nibble {

Scheduler::Scheduler(const SchedulerOptions& options) : options_(options) {
  NIBBLE_CHECK(options.max_sequences >= 1 && options.prefill_chunk >= 1);
  NIBBLE_CHECK(options.max_rows >= options.max_sequences);
}

void Scheduler::add(Id id, int64_t prompt_tokens) {
  NIBBLE_CHECK(prompt_tokens > 0);
  waiting_.push_back({id, prompt_tokens, 0});
}

void Scheduler::remove(Id id) {
  auto is_it = [&](const Entry& e) { return e.id == id; };
  std::erase_if(running_, is_it);
  std::erase_if(waiting_, is_it);
}

void Scheduler::append(Id id) {
  auto entry = std::find_if(running_.begin(), running_.end(), [&](const Entry& e) { return e.id == id; });
  NIBBLE_CHECK(entry != running_.end() && entry->done == entry->known);
  ++entry->known;
}

std::vector<Scheduler::Work> Scheduler::next(std::vector<Id>& admitted) {
  admitted.clear();
  while (!waiting_.empty() && running() < options_.max_sequences) {
    admitted.push_back(waiting_.front().id);
    running_.push_back(waiting_.front());
    waiting_.pop_front();
  }
  std::vector<Work> work;
  int64_t rows_left = options_.max_rows;
  auto take = [&](Entry& entry, int64_t rows) {
    entry.done += rows;
    rows_left -= rows;
    work.push_back({entry.id, rows, entry.done == entry.known});
  };
  // Decoding first: one row each, so that a long prompt never holds up those who are being answered.
  for (Entry& entry : running_) {
    if (entry.known - entry.done == 1) take(entry, 1);
  }
  for (Entry& entry : running_) {
    const int64_t left = entry.known - entry.done;
    const int64_t rows = std::min({left, options_.prefill_chunk, rows_left});
    if (left > 1 && rows > 0) take(entry, rows);
  }
  return work;
}

void Scheduler::check_integrity() const {
  NIBBLE_CHECK(running() <= options_.max_sequences);
  for (const Entry& e : running_) NIBBLE_CHECK(e.done >= 0 && e.done <= e.known);
  for (const Entry& e : waiting_) NIBBLE_CHECK(e.done == 0 && e.known > 0);
}

}  // namespace nibble
