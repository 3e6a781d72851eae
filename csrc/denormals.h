// Numbers below float32's normal range.
#pragma once

#include <cstdint>

namespace cofire {

// Tiny numbers count as zero while an engine runs: they say nothing and cost a hundred times as much. The caller's
// setting comes back at the end.
class FlushDenormals {
   public:
#if defined(__x86_64__)
    FlushDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

   private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | (uint64_t(1) << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

   private:
    uint64_t before_;
#endif
};

}  // namespace cofire
