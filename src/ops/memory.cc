#include "ops/memory.h"

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
    void* address = std::aligned_alloc(64, static_cast<size_t>(round_up(bytes > 0 ? bytes : 1, 64)));
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

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace nibble
