#include "base/read_ahead.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "base/file.h"
#include "places.h"

namespace nibble {
namespace {

constexpr int64_t kPiece = int64_t{8} << 20;

class ReadAheadTest : public testing::Test {
 protected:
  void SetUp() override {
    for (int64_t bytes : {int64_t{3}, 5 * kPiece + 12345, int64_t{0}, 2 * kPiece}) {
      // Tests run beside each other.
      const std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
      paths_.push_back(testing::TempDir() + "read_ahead_" + test + std::to_string(paths_.size()));
      std::ofstream(paths_.back()) << std::string(static_cast<size_t>(bytes), 'x');
      files_.push_back(FileSystem::posix().open(paths_.back()).value());
      total_ += bytes;
    }
  }
  void TearDown() override {
    for (const std::string& path : paths_) std::remove(path.c_str());
  }
  // Waits until so many bytes are begun; no more ever are, before somebody reads.
  static void wait_for(const ReadAhead& ahead, int64_t bytes) {
    while (ahead.begun_bytes() < bytes) std::this_thread::yield();
    EXPECT_EQ(ahead.begun_bytes(), bytes);
  }

  std::vector<std::string> paths_;
  std::vector<std::unique_ptr<File>> files_;
  int64_t total_ = 0;
};

TEST_F(ReadAheadTest, StaysWithinItsWindow) {
  const auto mappings = mappings_of(files_);
  EXPECT_EQ(mappings.size(), 3u);  // an empty file has none
  for (int threads : {1, 5}) {
    ReadAhead ahead(mappings, 2 * kPiece + 3, threads);
    wait_for(ahead, 2 * kPiece + 3);
    ahead.advance(kPiece - 1);
    std::this_thread::yield();
    EXPECT_EQ(ahead.begun_bytes(), 2 * kPiece + 3);
    ahead.advance(kPiece);
    wait_for(ahead, 3 * kPiece + 3);
    ahead.advance(total_);
    wait_for(ahead, total_);
  }
}

TEST_F(ReadAheadTest, EndsWithoutWhatIsLeft) {
  const auto mappings = mappings_of(files_);
  { const ReadAhead ahead(mappings, 0); }
  { const ReadAhead ahead(mappings, INT64_MAX / 2); }
  { const ReadAhead ahead({}, 100); }
  // Bytes that no page begins with, as those of a file that a test keeps in memory.
  const std::vector<std::byte> bytes(static_cast<size_t>(kPiece));
  const std::span<const std::byte> odd = std::span(bytes).subspan(1);
  ReadAhead ahead({odd}, INT64_MAX / 2, 2);
  wait_for(ahead, std::ssize(odd));
}

// A file that became shorter is the reader's error, not the end of the process.
TEST_F(ReadAheadTest, AShrunkFileIsLeftToWhoReadsIt) {
  ASSERT_EQ(::truncate(paths_[1].c_str(), 4096), 0);
  ReadAhead ahead(mappings_of(files_), INT64_MAX / 2);
  wait_for(ahead, total_);
}

// Where the system lets no thread start, nothing is brought in, and nothing is wrong.
TEST_F(ReadAheadTest, WithoutThreads) {
  const auto read_and_exit = [&] {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_AS, &none);  // no room for a thread's stack
    { const ReadAhead ahead(mappings_of(files_), INT64_MAX / 2); }
    std::_Exit(0);
  };
  EXPECT_EXIT(read_and_exit(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace nibble
