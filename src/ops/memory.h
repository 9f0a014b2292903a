// The memory of a backend: where weights, activations and the KV cache live.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "base/result.h"

namespace nibble {

class Memory {
 public:
  virtual ~Memory() = default;
  // At least 64-byte aligned. What does not fit is an error that names `purpose` and the bytes.
  virtual Result<void*> allocate(int64_t bytes, const std::string& purpose) = 0;
  // No more than this can be had now, as far as is known.
  virtual int64_t most_bytes() const { return INT64_MAX; }
  virtual void free(void* address) = 0;
  virtual void upload(void* to, const void* from_host, int64_t bytes) = 0;
  virtual void download(void* to_host, const void* from, int64_t bytes) = 0;
  // Memory of the host to which download() is fastest: for what comes every step. It lives as long as this.
  virtual Memory& host_side();
};

// Owns one allocation.
class Buffer {
 public:
  Buffer() = default;
  static Result<Buffer> allocate(Memory& memory, int64_t bytes, const std::string& purpose) {
    NIBBLE_ASSIGN_OR_RETURN(void* address, memory.allocate(bytes, purpose));
    return Buffer(&memory, address, bytes);
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (memory_ != nullptr) memory_->free(address_);
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(address_);
  }
  int64_t bytes() const { return bytes_; }
  Memory& memory() const { return *memory_; }

 private:
  Buffer(Memory* memory, void* address, int64_t bytes) : memory_(memory), address_(address), bytes_(bytes) {}
  Memory* memory_ = nullptr;
  void* address_ = nullptr;
  int64_t bytes_ = 0;
};

// The process's own memory; used by the reference and cpu backends. Refuses what would take more than the
// machine has free, instead of letting the kernel kill something later.
Memory& host_memory();

// What this process may still take of the machine's memory: what the kernel calls available, within the limit
// of its cgroup. INT64_MAX where neither is known. `root` stands before the paths of the kernel's files.
int64_t available_host_bytes(const std::string& root = "");

// Asks for huge pages under a buffer of host_memory() that is read whole, as weights are: a core reads a
// fifth faster where it looks up fewer pages. A hint. Not for what is used in part: it would take whole huge
// pages.
void use_huge_pages(const Buffer& host_buffer);

// Bits of the memory nodes that the process may use.
using MemoryNodes = std::array<uint64_t, 16>;

// The nodes over which weights are best spread, those with processors that the process may use: none where
// there is one alone, where the process came with a policy of its own (numactl), or where the kernel does not
// tell.
MemoryNodes nodes_to_spread_over();

// Lets the pages of a buffer of host_memory() that nobody has touched lie on these nodes in turn: any thread
// may come to read any of it, and so has the bandwidth of all. A hint; returns whether the kernel took it.
bool spread_over_nodes(const Buffer& host_buffer, const MemoryNodes& nodes);

}  // namespace nibble
