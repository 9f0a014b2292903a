#include "ops/memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "base/numbers.h"

namespace nibble {
namespace {

// MemAvailable of /proc/meminfo; nothing where it cannot be read.
int64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (meminfo >> key >> kib) {
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return INT64_MAX;
}

constexpr int64_t kHugePage = 2 << 20;           // x86-64's, and others' with pages of 4 KiB
constexpr int64_t kAlignedFrom = 2 * kHugePage;  // bytes of a buffer that begins and ends with a huge page

class HostMemory final : public Memory {
 public:
  Result<void*> allocate(int64_t bytes, const std::string& purpose) override {
    NIBBLE_CHECK(bytes >= 0);
    constexpr int64_t kAskAbove = 1 << 20;  // below, /proc/meminfo costs more than it protects
    if (bytes > kAskAbove) {
      if (int64_t available = available_bytes(); bytes > available) {
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

void use_huge_pages(const Buffer& host_buffer) {
#if defined(MADV_HUGEPAGE)
  if (host_buffer.bytes() >= kAlignedFrom)
    ::madvise(host_buffer.as<void>(), static_cast<size_t>(round_up(host_buffer.bytes(), kHugePage)),
              MADV_HUGEPAGE);
#endif
}

}  // namespace nibble
