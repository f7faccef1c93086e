// Large anonymous memory, aligned to huge pages where the system has them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace kvt {

constexpr size_t kHugePage = size_t{2} << 20;

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// What allocate() maps for `bytes`: whole huge pages only where that wastes little.
inline size_t mapped_bytes(size_t bytes) {
  return round_up(bytes ? bytes : 1, bytes >= kHugePage ? kHugePage : 4096);
}

#if defined(__SANITIZE_ADDRESS__)

// The address sanitizer watches the borders of what comes from the ordinary allocator.
inline std::byte* allocate(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 4096, bytes ? bytes : 1)) return nullptr;
  std::memset(memory, 0, bytes);
  return static_cast<std::byte*>(memory);
}

inline void release(std::byte* memory, size_t) { std::free(memory); }

#else

// Zeroed memory that takes no RAM until it is touched; null where there is none. Aligned to 4096
// bytes, and to 2 MiB from that size on: decode reads all weights in every step, and with small
// pages the misses of the translation buffer alone cost several percent of the bandwidth.
inline std::byte* allocate(size_t bytes) {
  const size_t size = mapped_bytes(bytes);
  const size_t slack = size >= kHugePage ? kHugePage : 0;
  if (size + slack < bytes) return nullptr;
  void* memory = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* first = static_cast<std::byte*>(memory);
  if (slack) {
    const size_t before = round_up(reinterpret_cast<uintptr_t>(first), kHugePage) -
                          reinterpret_cast<uintptr_t>(first);
    if (before) munmap(first, before);
    first += before;
    if (slack > before) munmap(first + size, slack - before);
#ifdef MADV_HUGEPAGE
    madvise(first, size, MADV_HUGEPAGE);  // advice: failing is no fault
#endif
  }
  return first;
}

inline void release(std::byte* memory, size_t bytes) {
  if (memory) munmap(memory, mapped_bytes(bytes));
}

#endif

// Memory that is freed with its owner.
class Region {
 public:
  Region() = default;
  explicit Region(size_t bytes) : bytes_(bytes), data_(allocate(bytes)) {}
  Region(Region&& other) noexcept : bytes_(other.bytes_), data_(other.data_) {
    other.data_ = nullptr;
  }
  Region& operator=(Region&& other) noexcept {
    if (this == &other) return *this;
    release(data_, bytes_);
    bytes_ = other.bytes_;
    data_ = other.data_;
    other.data_ = nullptr;
    return *this;
  }
  ~Region() { release(data_, bytes_); }

  std::byte* data() const { return data_; }  // null: no memory
  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace kvt
