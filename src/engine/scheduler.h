// Which rows run in the next step: plain bookkeeping over sequences, no tensor, no clock.
//
// Every sequence that has its prompt behind it decodes in each step; what is left of the step's rows goes to
// prompts, in the order of their arrival, in chunks. Since a row's result does not depend on its neighbours
// (ops.h), this choice changes no bit of anyone's text.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace nibble {

// Larger ones are faster, since each expert's weights are read once for more rows, and take more memory:
// docs/lab/2026-11-30-experts-on-the-gpu.md.
inline constexpr int64_t kDefaultPrefillChunk = 512;

struct SchedulerOptions {
  int64_t max_sequences = 1;                     // running at once
  int64_t max_rows = kDefaultPrefillChunk;       // of a step
  int64_t prefill_chunk = kDefaultPrefillChunk;  // rows of one prompt in a step
};

class Scheduler {
 public:
  using Id = int64_t;
  struct Work {
    Id id;
    int64_t rows;          // new tokens of this sequence
    bool finishes_prompt;  // its last row is the last of what is known: a token is to be sampled
  };

  // REQUIRES max_rows >= max_sequences, so that every running sequence can decode, and all sizes >= 1.
  explicit Scheduler(const SchedulerOptions& options);

  // A sequence with that many known tokens waits for its turn.
  void add(Id id, int64_t prompt_tokens);
  // It is done or gone, wherever it was.
  void remove(Id id);
  // One more token of it is known (sampled).
  void append(Id id);

  // The rows of the next step; empty where nothing is to do. Sequences that start to run are in `admitted`.
  // Counts the rows as done.
  std::vector<Work> next(std::vector<Id>& admitted);

  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  void check_integrity() const;

 private:
  struct Entry {
    Id id;
    int64_t known;  // tokens
    int64_t done;   // of them in the KV cache
  };
  SchedulerOptions options_;
  std::vector<Entry> running_;  // by arrival
  std::deque<Entry> waiting_;
};

}  // namespace nibble
