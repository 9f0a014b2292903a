// What the kernel's files say of memory.
#include "ops/memory.h"

#include <gtest/gtest.h>
#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "fake_root.h"

namespace nibble::testing {
namespace {

class AvailableMemory : public WithFakeRoot {
 protected:
  int64_t bytes() const { return available_host_bytes(root_); }
};

TEST_F(AvailableMemory, NothingKnownIsNoLimit) { EXPECT_EQ(bytes(), INT64_MAX); }

TEST_F(AvailableMemory, OfTheMachine) {
  write("/proc/meminfo", "MemTotal:  16000 kB\nMemFree:   100 kB\nMemAvailable:   8000 kB\nBuffers: 1 kB\n");
  EXPECT_EQ(bytes(), 8000 * 1024);
  write("/sys/fs/cgroup/memory.max", "max\n");
  write("/sys/fs/cgroup/memory.current", "1000\n");
  EXPECT_EQ(bytes(), 8000 * 1024);
}

TEST_F(AvailableMemory, WithinTheLimitOfACgroup) {
  write("/proc/meminfo", "MemAvailable: 8000 kB\n");
  write("/sys/fs/cgroup/memory.max", "1000000\n");
  write("/sys/fs/cgroup/memory.current", "900000\n");
  EXPECT_EQ(bytes(), 100000);
  write("/sys/fs/cgroup/memory.stat", "anon 1\nfile 600000\ninactive_file 300000\nactive_file 200000\n");
  EXPECT_EQ(bytes(), 600000);
  write("/sys/fs/cgroup/memory.current", "2000000\n");
  EXPECT_EQ(bytes(), 0);
}

TEST_F(AvailableMemory, WithinTheLimitOfAFirstCgroup) {
  write("/proc/meminfo", "MemAvailable: 8000 kB\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "700000\n");
  write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file 100000\n");
  EXPECT_EQ(bytes(), 400000);
}

TEST_F(AvailableMemory, WithinTheLimitsOfItsOwnCgroupAndOfThoseAbove) {
  write("/proc/meminfo", "MemAvailable: 8000 kB\n");
  write("/proc/self/cgroup", "0::/a.slice/job\n");
  write("/sys/fs/cgroup/a.slice/job/memory.max", "max\n");
  write("/sys/fs/cgroup/a.slice/job/memory.current", "1\n");
  write("/sys/fs/cgroup/a.slice/memory.max", "700000\n");
  write("/sys/fs/cgroup/a.slice/memory.current", "100000\n");
  EXPECT_EQ(bytes(), 600000);
  write("/sys/fs/cgroup/a.slice/job/memory.max", "500000\n");
  EXPECT_EQ(bytes(), 499999);
  write("/proc/self/cgroup", "x\n7:cpu:/b\n4:cpu,memory:/b\n0::/\n1:memory\n2:memory:c\n");
  EXPECT_EQ(bytes(), 8000 * 1024);
  write("/sys/fs/cgroup/memory/b/memory.limit_in_bytes", "300000\n");
  write("/sys/fs/cgroup/memory/b/memory.usage_in_bytes", "0\n");
  EXPECT_EQ(bytes(), 300000);
}

TEST_F(AvailableMemory, IsKnownHere) {
  EXPECT_GT(available_host_bytes(), 0);
  EXPECT_LT(available_host_bytes(), INT64_MAX);
  EXPECT_EQ(host_memory().most_bytes() < INT64_MAX, true);
}

#if defined(SYS_mbind)
// A node by itself is nothing to spread over unless asked for.
TEST(MemoryNodes, PagesAreSpreadOverThem) {
  const Buffer buffer = Buffer::allocate(host_memory(), 8 << 20, "test").value();
  auto policy = [&] {
    int of_buffer = -1;
    ::syscall(SYS_get_mempolicy, &of_buffer, nullptr, 0, buffer.as<void>(), MPOL_F_ADDR);
    return of_buffer;
  };
  MemoryNodes node = {};  // the first that this process may use
  ::syscall(SYS_get_mempolicy, nullptr, node.data(), 8 * sizeof(node), nullptr, MPOL_F_MEMS_ALLOWED);
  for (bool found = false; uint64_t & some : node) {
    some = found ? 0 : some & -some;
    found = found || some != 0;
  }
  const int before = policy();
  EXPECT_FALSE(spread_over_nodes(buffer, {}));
  EXPECT_EQ(policy(), before);
  // Containers may forbid it; that must show in what it returns.
  const bool may = ::syscall(SYS_mbind, buffer.as<void>(), 8 << 20, MPOL_DEFAULT, nullptr, 0, 0) == 0;
  EXPECT_EQ(spread_over_nodes(buffer, node), may);
  EXPECT_EQ(policy(), may ? MPOL_INTERLEAVE : before);
}
#endif

}  // namespace
}  // namespace nibble::testing
