// Kills, torn files, faults: what is left behind, and that the next run makes the same bytes of it.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "base/output_file.h"
#include "checkpoint/quantize.h"
#include "checkpoint/job_journal.h"
#include "checkpoint/quantize_models.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::KilledBySignal;

class QuantizeResume : public QuantizeTest {
 protected:
  // Runs a job in a child that gets a kill -9 as soon as `bytes` of the source are done.
  void kill_after(int64_t bytes, const FileSystem& files) const {
    QuantizeOptions job = options();
    job.progress = [&](const JobProgress& progress) {
      if (progress.done_bytes - progress.found_bytes >= bytes) std::raise(SIGKILL);
    };
    EXPECT_EXIT((void)quantize_model(files, job), KilledBySignal(SIGKILL), "");
  }
  std::map<std::string, std::string> whole() const {
    const auto done = quantize_model(source_files(), options("whole"));
    EXPECT_TRUE(done.ok());
    return tree_of(path("whole"));
  }
  std::string made(const std::string& name) const { return path("dst/.partial/files/" + name); }
  std::string first_shard() const {
    for (const auto& entry : fs::directory_iterator(made(""))) {
      if (entry.path().filename().string().starts_with("model-00001-of-")) return entry.path().string();
    }
    ADD_FAILURE() << "no first shard";
    return "";
  }
  void overwrite(const std::string& file, const std::string& text) const {
    std::ofstream(file, std::ios::binary) << text;
  }
};

TEST_F(QuantizeResume, AfterAKillAnywhere) {
  const FaultyFileSystem files = source_files();
  const auto wanted = whole();
  const int64_t total = 40 * 128 + 256 + 6 * 128 + 32 * 128 + 48 * 128 + 6 * (32 * 128 * 2 + 32 * 256);
  for (int64_t bytes = 1; bytes <= total; bytes += total / 9) {
    fs::remove_all(path("dst"));
    kill_after(bytes, files);
    EXPECT_FALSE(fs::exists(path("dst/config.json")));
    const auto done = quantize_model(files, options());
    ASSERT_TRUE(done.ok()) << done.status().message();
    if (bytes > total / 2) {
      EXPECT_GT(done->resumed_shards, 0);
    }
    expect_same_tree(tree_of(path("dst")), wanted);
  }
}

TEST_F(QuantizeResume, AfterManyKills) {
  const FaultyFileSystem files = source_files();
  const auto wanted = whole();
  for (int i = 0; i < 4; ++i) kill_after(25'000, files);
  const auto done = quantize_model(files, options());
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_GT(done->resumed_shards, 0);
  expect_same_tree(tree_of(path("dst")), wanted);
}

TEST_F(QuantizeResume, FinishedShardsAreNotMadeAgain) {
  const FaultyFileSystem files = source_files();
  kill_after(60'000, files);
  const auto before = fs::last_write_time(first_shard());
  kill_after(20'000, files);
  EXPECT_EQ(fs::last_write_time(first_shard()), before);
}

// What is not as the journal says is made again, whatever happened to it.
TEST_F(QuantizeResume, DamagedShardsAreMadeAgain) {
  const FaultyFileSystem files = source_files();
  const auto wanted = whole();
  for (const char* damage : {"flip", "cut", "grow", "gone"}) {
    fs::remove_all(path("dst"));
    kill_after(60'000, files);
    const std::string shard = first_shard();
    std::string bytes = tree_of(fs::path(shard).parent_path())[fs::path(shard).filename()];
    if (damage == std::string("flip")) bytes[bytes.size() / 2] ^= 1;
    if (damage == std::string("cut")) bytes.pop_back();
    if (damage == std::string("grow")) bytes += '\0';
    overwrite(shard, bytes);
    if (damage == std::string("gone")) fs::remove(shard);
    overwrite(made("left over.new"), "of no use");
    const auto done = quantize_model(files, options());
    ASSERT_TRUE(done.ok()) << damage << ": " << done.status().message();
    expect_same_tree(tree_of(path("dst")), wanted);
  }
}

TEST_F(QuantizeResume, KilledWhileFilesMoveUp) {
  const FaultyFileSystem files = source_files();
  const auto wanted = whole();
  kill_after(60'000, files);
  auto journal = JobJournal::load(FileSystem::posix(), path("dst/.partial/journal.json"));
  ASSERT_TRUE(journal.ok() && journal->has_value());
  fs::remove_all(path("dst"));
  ASSERT_TRUE(quantize_model(files, options()).ok());
  // As it is when the kill comes after some of the moves: config.json is the last.
  fs::create_directories(made(""));
  fs::rename(path("dst/config.json"), made("config.json"));
  fs::rename(path("dst/tokenizer.json"), made("tokenizer.json"));
  (*journal)->complete = true;
  ASSERT_TRUE((*journal)->save(path("dst/.partial/journal.json")).ok());
  const auto done = quantize_model(files, options());
  ASSERT_TRUE(done.ok()) << done.status().message();
  expect_same_tree(tree_of(path("dst")), wanted);
}

TEST_F(QuantizeResume, OtherOptionsAreRefused) {
  kill_after(60'000, source_files());
  auto expect_refused = [&](const FileSystem& files, const QuantizeOptions& job,
                            const std::string& fragment) {
    const auto before = tree_of(path("dst"));
    const auto done = quantize_model(files, job);
    ASSERT_FALSE(done.ok());
    EXPECT_NE(done.status().message().find(fragment), std::string::npos) << done.status().message();
    expect_same_tree(tree_of(path("dst")), before);
  };
  QuantizeOptions job = options();
  job.type = QuantizeType::kQ4;
  expect_refused(source_files(), job, "--type nvfp4, this run has q4");
  job = options();
  job.what = QuantizeWhat::kAllLinear;
  expect_refused(source_files(), job, "--what experts, this run has all-linear");
  expect_refused(source_files(), options("dst", 11'000), "--max-shard-size 10000");
  SafetensorsWriter other = source_weights();
  other.add("more", "F32", {1}, bytes_of(std::vector<float>{1}));
  expect_refused(source_files(other), options(), "source headers");
  expect_refused(source_files(source_weights(), R"({"model_type": "other"})"), options(), "source headers");
  overwrite(path("dst/.partial/journal.json"), "{\"job\": 1}");
  expect_refused(source_files(), options(), "not the journal");
}

TEST_F(QuantizeResume, TwoAtOnceAreRefused) {
  kill_after(60'000, source_files());
  const auto lock = LockFile::acquire(path("dst/.partial/lock"));
  ASSERT_TRUE(lock.ok());
  const auto done = quantize_model(source_files(), options());
  ASSERT_FALSE(done.ok());
  EXPECT_NE(done.status().message().find("another process"), std::string::npos);
}

// Faults of the source: the tensor and the file are named, and nothing remains of a run without a whole
// shard.
TEST_F(QuantizeResume, BadSources) {
  const std::string first = expert(0, "gate_proj");
  auto with = [&](const std::string& name, float bad, size_t at) {
    std::vector<float> values = random_values(32 * 64, 1);
    values[at] = bad;
    return source_files(source_weights().replace(name, "BF16", {32, 64}, bf16(values)));
  };
  struct Case {
    const char* name;
    FaultyFileSystem files;
    std::vector<std::string> fragments;
  };
  const float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<Case> cases;
  cases.push_back({"NaN", with(first, std::nanf(""), 65), {first, "nan", "[1, 1]"}});
  cases.push_back({"infinity", with(expert(0, "up_proj"), -kInfinity, 0), {"up_proj", "-inf", "[0, 0]"}});
  cases.push_back({"bad sector", source_files(), {"Input/output error", kWeights}});
  cases.back().files.fail_read_at(kWeights, std::ssize(source_weights().file()) - 5000);
  cases.push_back({"shrunk", source_files(), {"the file ends", kWeights}});
  cases.back().files.shrink(kWeights, std::ssize(source_weights().file()) - 5000);
  cases.push_back({"no config", source_files(), {"m/config.json", "is missing"}});
  cases.back().files.hide("m/config.json");
  cases.push_back({"no weights", source_files(), {"model.safetensors"}});
  cases.back().files.hide(kWeights);
  cases.push_back({"unreadable tokenizer", source_files(), {"m/tokenizer.json", "Permission denied"}});
  cases.back().files.refuse_open("m/tokenizer.json");
  cases.push_back({"quantized by its config",
                   source_files(source_weights(), R"({"quantization_config": {"quant_method": "fp8"}})"),
                   {"already quantized", "fp8"}});
  cases.push_back({"quantized inside",
                   source_files(source_weights(), R"({"text_config": {"quantization_config": {}}})"),
                   {"already quantized"}});
  cases.push_back({"config is a list", source_files(source_weights(), "[]"), {"m/config.json"}});
  cases.push_back({"quantized by its tensors",
                   source_files(source_weights().replace(first, "U8", {32, 32}, std::string(1024, 'x'))),
                   {"already quantized", first, "U8"}});
  for (const Case& bad : cases) {
    // One shard, so that no shard can be whole.
    const auto done = quantize_model(bad.files, options("dst", 1 << 30));
    ASSERT_FALSE(done.ok()) << bad.name;
    for (const std::string& fragment : bad.fragments)
      EXPECT_NE(done.status().message().find(fragment), std::string::npos)
          << bad.name << ": " << done.status().message();
    EXPECT_FALSE(fs::exists(path("dst"))) << bad.name;
  }
}

// A source that is well again goes on from the shards that were made.
TEST_F(QuantizeResume, AfterAReadError) {
  const auto wanted = whole();
  FaultyFileSystem files = source_files();
  files.fail_read_at(kWeights, std::ssize(source_weights().file()) - 5000);
  ASSERT_FALSE(quantize_model(files, options()).ok());
  EXPECT_FALSE(fs::exists(path("dst/config.json")));
  const auto done = quantize_model(source_files(), options());
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_GT(done->resumed_shards, 0);
  expect_same_tree(tree_of(path("dst")), wanted);
}

TEST_F(QuantizeResume, BadDestinations) {
  const FaultyFileSystem files = source_files();
  auto message = [&](const std::string& destination) {
    QuantizeOptions job = options();
    job.destination = destination;
    const auto done = quantize_model(files, job);
    EXPECT_FALSE(done.ok()) << destination;
    return done.status().message();
  };
  overwrite(path("file"), "x");
  EXPECT_NE(message(path("file")).find("no directory"), std::string::npos);
  EXPECT_NE(message(path("file/below")).find("cannot make the directory"), std::string::npos);
  fs::create_directories(path("full"));
  overwrite(path("full/thing"), "x");
  EXPECT_NE(message(path("full")).find("'thing'"), std::string::npos);
  EXPECT_NE(message("m").find("same directory"), std::string::npos);
  EXPECT_NE(message("./m/").find("same directory"), std::string::npos);
  EXPECT_NE(message("m/below").find("inside of the source"), std::string::npos);
  EXPECT_TRUE(fs::exists(path("full/thing")));
  fs::create_directories(path("empty"));
  QuantizeOptions job = options("empty");
  EXPECT_TRUE(quantize_model(files, job).ok());
}

}  // namespace
}  // namespace nibble
