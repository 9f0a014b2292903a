// A directory that stands before the paths of the kernel's files, in a test that says what is in them.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace nibble::testing {

class WithFakeRoot : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(root_); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ + path).substr(0, (root_ + path).rfind('/')));
    std::ofstream(root_ + path) << text;
  }

  // Of this process and test alone.
  std::string root_ = ::testing::TempDir() + "nibble_root_" + std::to_string(::getpid()) +
                      ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

}  // namespace nibble::testing
