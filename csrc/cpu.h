// What the CPU of this machine can do.
#pragma once

#include <string>
#include <vector>

namespace cofire {

// The instruction sets that matter for our kernels and that both CPU and operating system support,
// e.g. {"avx2", "fma"}. Empty where we do not know how to ask.
std::vector<std::string> cpu_features();

// The CPU's model and instruction sets in one line: what a tuning holds for.
std::string machine();

}  // namespace cofire
