// What the CPU of this machine can do.
#pragma once

#include <string>
#include <vector>

namespace cofire {

// The instruction sets that matter for our kernels and that both CPU and operating system support,
// e.g. {"avx2", "fma"}. Empty where we do not know how to ask.
std::vector<std::string> cpu_features();

}  // namespace cofire
