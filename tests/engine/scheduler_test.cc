#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace nibble {
namespace {

TEST(Scheduler, DecodesFirstThenFillsWithPrompts) {
  Scheduler scheduler({.max_sequences = 2, .max_rows = 6, .prefill_chunk = 4});
  std::vector<Scheduler::Id> admitted;
  scheduler.add(1, 3);
  auto work = scheduler.next(admitted);
  ASSERT_EQ(work.size(), 1u);
  EXPECT_EQ(work[0].rows, 3);
  EXPECT_TRUE(work[0].finishes_prompt);
  scheduler.append(1);
  scheduler.add(2, 10);
  scheduler.add(3, 1);
  work = scheduler.next(admitted);
  EXPECT_EQ(admitted, (std::vector<Scheduler::Id>{2}));  // 3 waits: two run
  ASSERT_EQ(work.size(), 2u);
  EXPECT_EQ(work[0].id, 1);
  EXPECT_EQ(work[0].rows, 1);
  EXPECT_EQ(work[1].id, 2);
  EXPECT_EQ(work[1].rows, 4);
  EXPECT_FALSE(work[1].finishes_prompt);
  scheduler.remove(1);
  work = scheduler.next(admitted);
  EXPECT_EQ(admitted, (std::vector<Scheduler::Id>{3}));
  ASSERT_EQ(work.size(), 2u);
  EXPECT_EQ(work[0].id, 3);
  EXPECT_TRUE(work[0].finishes_prompt);
}

// Whatever comes and goes: limits hold, every token of every sequence runs once and in order, nobody starves.
TEST(Scheduler, RandomLife) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    SchedulerOptions options{.max_sequences = 1 + static_cast<int64_t>(random() % 4)};
    options.max_rows = options.max_sequences + static_cast<int64_t>(random() % 20);
    options.prefill_chunk = 1 + static_cast<int64_t>(random() % 10);
    Scheduler scheduler(options);
    std::map<Scheduler::Id, int64_t> known, done;
    std::map<Scheduler::Id, int> idle_steps;
    Scheduler::Id next_id = 1;
    std::set<Scheduler::Id> running;
    for (int step = 0; step < 400; ++step) {
      if (random() % 5 == 0) {
        known[next_id] = 1 + static_cast<int64_t>(random() % 40);
        scheduler.add(next_id, known[next_id]);
        ++next_id;
      }
      if (random() % 15 == 0 && !known.empty()) {
        Scheduler::Id gone = std::next(known.begin(), static_cast<int64_t>(random() % known.size()))->first;
        scheduler.remove(gone);
        known.erase(gone);
        running.erase(gone);
        idle_steps.erase(gone);
      }
      std::vector<Scheduler::Id> admitted;
      auto work = scheduler.next(admitted);
      scheduler.check_integrity();
      running.insert(admitted.begin(), admitted.end());
      EXPECT_LE(static_cast<int64_t>(running.size()), options.max_sequences);
      int64_t rows = 0;
      std::set<Scheduler::Id> worked;
      for (const auto& w : work) {
        EXPECT_TRUE(running.count(w.id) != 0 && worked.insert(w.id).second);
        EXPECT_LE(w.rows, options.prefill_chunk);
        EXPECT_GT(w.rows, 0);
        rows += w.rows;
        const bool decoding = known[w.id] - done[w.id] == 1;
        done[w.id] += w.rows;
        EXPECT_EQ(w.finishes_prompt, done[w.id] == known[w.id]);
        EXPECT_TRUE(!decoding || w.rows == 1);
        if (w.finishes_prompt) {
          scheduler.append(w.id);
          ++known[w.id];
        }
      }
      EXPECT_LE(rows, options.max_rows);
      for (Scheduler::Id id : running) {
        idle_steps[id] = worked.count(id) != 0 ? 0 : idle_steps[id] + 1;
        EXPECT_TRUE(worked.count(id) != 0 || known[id] - done[id] > 1) << "a decoding sequence was left out";
      }
    }
  }
}

}  // namespace
}  // namespace nibble
