// What the processor has and the system saves at a change of threads.
#pragma once

#include <cstdint>

#include "kvt.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvt {

#if defined(__x86_64__)

// Registers that the system saves: Intel's manual, volume 1, 13.3. Only where OSXSAVE is set.
inline uint64_t saved_registers() {
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

inline bool has_all(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

// Bits of cpuid: Intel's manual, volume 2A, CPUID.
inline uint32_t machine_features() {
  constexpr uint32_t kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr uint32_t kAvx2 = 1u << 5, kBmi2 = 1u << 8;
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F DQ CD BW VL
  constexpr uint32_t kVbmi = 1u << 1, kVnni = 1u << 11, kBf16 = 1u << 5;
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has_all(c, kFma | kOsXsave | kAvx | kF16c)) return 0;
  const uint64_t saved = saved_registers();
  if ((saved & kYmm) != kYmm) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has_all(b, kAvx2 | kBmi2)) return 0;
  uint32_t features = KVT_HAS_AVX2;
  const bool has_avx512 = (saved & kZmm) == kZmm && has_all(b, kAvx512) && has_all(c, kVbmi | kVnni);
  const uint32_t num_leaves = a;
  if (has_avx512 && num_leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has_all(a, kBf16))
    features |= KVT_HAS_AVX512;
  return features;
}

#else

inline uint32_t machine_features() { return 0; }

#endif

}  // namespace kvt
