// What the CPU of this machine can do.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cofire {

// The instruction sets that matter for our kernels and that both CPU and operating system support,
// e.g. {"avx2", "fma"}. Empty where we do not know how to ask.
std::vector<std::string> cpu_features();

// What an x86-64 CPU answers: ecx of leaf 1, ebx and ecx of leaf 7, ecx of leaf 0x80000001; and which registers the
// operating system keeps for each thread (xgetbv 0, or 0 if it cannot be asked).
struct CpuAnswers {
    uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx, extended_ecx;
    uint64_t kept;
};

// The same as names. What works on registers that the operating system does not keep is left out.
std::vector<std::string> features_of(const CpuAnswers& answers);

// Whether a CPU with these features runs code that was compiled for the level "v2", "v3" or "v4" of x86-64: it must
// have every instruction set of the level, for the compiler may use any of them.
bool runs_level(std::string_view level, const std::vector<std::string>& features);

// The family of AMD's CPUs from 15 on, from eax of leaf 1: 25 is Zen 3 and 4, 26 is Zen 5.
int amd_family(uint32_t leaf1_eax);

// The CPU's model and instruction sets in one line: what a tuning holds for.
std::string machine();

}  // namespace cofire
