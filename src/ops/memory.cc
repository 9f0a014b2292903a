#include "ops/memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>

#include "base/numbers.h"
#include "base/thread_pool.h"

namespace nibble {
namespace {

// The value behind `key` in lines of keys and values.
std::optional<int64_t> value_of(const std::string& path, const std::string& wanted) {
  std::ifstream lines(path);
  std::string key, rest;
  int64_t value = 0;
  while (lines >> key >> value) {
    if (key == wanted) return value;
    std::getline(lines, rest);
  }
  return std::nullopt;
}
// A file that holds a number ("max", which cgroups write for none, is no number).
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// What the cgroup's limit leaves; pages of files count as free, since the kernel drops them where it has to.
std::optional<int64_t> cgroup_bytes(const std::string& folder, const std::string& limit_file,
                                    const std::string& usage_file, const std::string& prefix) {
  const std::optional<int64_t> limit = number_in(folder + limit_file), usage = number_in(folder + usage_file);
  if (!limit || !usage) return std::nullopt;
  int64_t files = 0;
  for (const char* key : {"inactive_file", "active_file"})
    files += value_of(folder + "memory.stat", prefix + key).value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *usage - files));
}

constexpr int64_t kHugePage = 2 << 20;           // x86-64's, and others' with pages of 4 KiB
constexpr int64_t kAlignedFrom = 2 * kHugePage;  // bytes of a buffer that begins and ends with a huge page

class HostMemory final : public Memory {
 public:
  Result<void*> allocate(int64_t bytes, const std::string& purpose) override {
    NIBBLE_CHECK(bytes >= 0);
    constexpr int64_t kAskAbove = 1 << 20;  // below, /proc/meminfo costs more than it protects
    if (bytes > kAskAbove) {
      if (int64_t available = most_bytes(); bytes > available) {
        return user_error("{}: wanted {} of memory, but only {} is available", purpose, format_bytes(bytes),
                          format_bytes(available));
      }
    }
    const int64_t align = bytes >= kAlignedFrom ? kHugePage : 64;
    const auto whole = static_cast<size_t>(round_up(bytes > 0 ? bytes : 1, align));
    void* address = std::aligned_alloc(static_cast<size_t>(align), whole);
    if (address == nullptr) return user_error("{}: no memory for {}", purpose, format_bytes(bytes));
    return address;
  }
  int64_t most_bytes() const override { return available_host_bytes(); }
  void free(void* address) override { std::free(address); }  // NOLINT(cppcoreguidelines-no-malloc)
  void upload(void* to, const void* from_host, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from_host, static_cast<size_t>(bytes));
  }
  void download(void* to_host, const void* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to_host, from, static_cast<size_t>(bytes));
  }
};

}  // namespace

Memory& Memory::host_side() { return host_memory(); }

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

int64_t available_host_bytes(const std::string& root) {
  int64_t bytes = INT64_MAX;
  auto at_most = [&](std::optional<int64_t> limit) { bytes = std::min(bytes, limit.value_or(bytes)); };
  const std::optional<int64_t> kib = value_of(root + "/proc/meminfo", "MemAvailable:");
  at_most(kib ? std::optional(*kib * 1024) : std::nullopt);
  // The limits of the cgroup and of all that it lies in. In a container its own one is often the root.
  auto second = [&](const std::string& path) {
    at_most(cgroup_bytes(root + "/sys/fs/cgroup" + path, "memory.max", "memory.current", ""));
  };
  auto first = [&](const std::string& path) {
    at_most(cgroup_bytes(root + "/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes",
                         "memory.usage_in_bytes", "total_"));
  };
  second("/");
  first("/");
  std::ifstream cgroups(root + "/proc/self/cgroup");  // lines of NUMBER:CONTROLLERS:PATH
  for (std::string line; std::getline(cgroups, line);) {
    const size_t colon = line.find(':'), path_colon = line.find(':', colon + 1);
    if (colon == std::string::npos || path_colon == std::string::npos) continue;
    const std::string controllers = "," + line.substr(colon + 1, path_colon - colon - 1) + ",";
    for (std::string path = line.substr(path_colon + 1); path.size() > 1;
         path.resize(path.find_last_of('/', path.size()))) {
      if (controllers == ",,") second(path + "/");
      if (controllers.find(",memory,") != std::string::npos) first(path + "/");
      if (path.find_last_of('/') == std::string::npos) break;
    }
  }
  return bytes;
}

void use_huge_pages(const Buffer& host_buffer) {
#if defined(MADV_HUGEPAGE)
  if (host_buffer.bytes() >= kAlignedFrom)
    ::madvise(host_buffer.as<void>(), static_cast<size_t>(round_up(host_buffer.bytes(), kHugePage)),
              MADV_HUGEPAGE);
#endif
}

// By system calls: libnuma would be a library for two lines.
MemoryNodes nodes_to_spread_over() {
  MemoryNodes nodes{};
#if defined(SYS_get_mempolicy)
  int policy = MPOL_DEFAULT, of_nodes = 0;
  if (::syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0 || policy != MPOL_DEFAULT ||
      ::syscall(SYS_get_mempolicy, nullptr, nodes.data(), 8 * sizeof(nodes), nullptr, MPOL_F_MEMS_ALLOWED) !=
          0)
    return {};
  // Only those with processors of ours: others are far, or the memory of a device.
  const std::vector<int> ours = affinity_mask();
  for (size_t node = 0; node < 64 * nodes.size(); ++node) {
    uint64_t& some = nodes[node / 64];
    const uint64_t bit = uint64_t{1} << node % 64;
    if ((some & bit) == 0) continue;
    const bool is_near = std::ranges::any_of(ours, [&](int cpu) {
      return ::access(fmt::format("/sys/devices/system/cpu/cpu{}/node{}", cpu, node).c_str(), F_OK) == 0;
    });
    if (!is_near) some &= ~bit;
  }
  for (uint64_t some : nodes) of_nodes += std::popcount(some);
  if (of_nodes < 2) return {};
#endif
  return nodes;
}

bool spread_over_nodes(const Buffer& host_buffer, const MemoryNodes& nodes) {
#if defined(SYS_mbind)
  return nodes != MemoryNodes{} && host_buffer.bytes() >= kAlignedFrom &&
         ::syscall(SYS_mbind, host_buffer.as<void>(), round_up(host_buffer.bytes(), kHugePage),
                   MPOL_INTERLEAVE, nodes.data(), 8 * sizeof(nodes), 0) == 0;
#else
  return false;
#endif
}

}  // namespace nibble
