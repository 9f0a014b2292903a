#include "base/faulty_file.h"

#include <gtest/gtest.h>

#include <array>

#include "places.h"

namespace nibble {
namespace {

using Names = std::vector<std::string>;

TEST(FaultyFile, FilesInMemory) {
  FaultyFileSystem files;
  files.add_file("d/a", "abc");
  files.add_file("d/sub/b", "");
  EXPECT_TRUE(files.exists("d/a") && files.exists("d") && files.exists("d/sub"));
  EXPECT_TRUE(files.is_directory("d") && files.is_directory("d/"));
  EXPECT_FALSE(files.is_directory("d/a") || files.exists("d/b") || files.exists("e"));
  EXPECT_EQ(*files.list("d"), (Names{"a", "sub"}));
  EXPECT_EQ(*read_text(files, "d/a", 3), "abc");
  EXPECT_FALSE(read_text(files, "d/a", 2).ok());
  EXPECT_FALSE(files.open("d").ok() || files.open("e").ok() || files.list("e").ok());
  Result<std::unique_ptr<File>> file = files.open("d/a");
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->map().size(), 3u);
  std::array<std::byte, 2> out;
  EXPECT_TRUE((*file)->read_at(1, out).ok());
  EXPECT_EQ(out[1], std::byte{'c'});
  EXPECT_FALSE((*file)->read_at(2, out).ok());
  EXPECT_FALSE((*file)->read_at(-1, out).ok());
}

TEST(FaultyFile, Faults) {
  FaultyFileSystem files;
  for (const char* path : {"d/hidden", "d/refused", "d/unmapped", "d/bad", "d/shrunk"})
    files.add_file(path, "0123456789");
  files.hide("d/hidden");
  files.refuse_open("d/refused");
  files.refuse_map("d/unmapped");
  files.fail_read_at("d/bad", 4);
  files.shrink("d/shrunk", 4);
  EXPECT_FALSE(files.exists("d/hidden") || files.open("d/hidden").ok());
  EXPECT_EQ(*files.list("d"), (Names{"bad", "refused", "shrunk", "unmapped"}));
  EXPECT_TRUE(files.exists("d/refused"));
  EXPECT_FALSE(files.open("d/refused").ok());
  std::array<std::byte, 4> out;
  for (const char* path : {"d/unmapped", "d/bad", "d/shrunk"}) {
    Result<std::unique_ptr<File>> file = files.open(path);
    ASSERT_TRUE(file.ok());
    EXPECT_TRUE((*file)->map().empty());
    EXPECT_EQ((*file)->size_bytes(), 10);
    EXPECT_TRUE((*file)->read_at(0, out).ok());
    EXPECT_EQ((*file)->read_at(1, out).ok(), std::string(path) == "d/unmapped") << path;
  }
  EXPECT_TRUE((*files.open("d/bad"))->read_at(5, out).ok());
}

TEST(FaultyFile, OverTheRealFileSystem) {
  const std::string demo = demo_directory();
  FaultyFileSystem files(&FileSystem::posix());
  files.add_file(demo + "/config.json", "{}");
  files.hide(demo + "/README.md");
  EXPECT_EQ(*read_text(files, demo + "/config.json", 100), "{}");
  EXPECT_TRUE(files.exists(demo + "/model.safetensors"));
  Names below = *FileSystem::posix().list(demo), names = *files.list(demo);
  std::erase(below, "README.md");
  EXPECT_EQ(names, below);
}

}  // namespace
}  // namespace nibble
