#include "cpu.h"

#include <fstream>

namespace cofire {

std::vector<std::string> cpu_features() {
    std::vector<std::string> features;
#if defined(__x86_64__) && defined(__GNUC__)
    // Asked at run time: the machine that runs a wheel is not the one that built it.
    __builtin_cpu_init();
    // The builtin takes only literals, hence no loop.
    if (__builtin_cpu_supports("avx2")) features.emplace_back("avx2");
    if (__builtin_cpu_supports("fma")) features.emplace_back("fma");
    if (__builtin_cpu_supports("avx512f")) features.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx512vnni")) features.emplace_back("avx512vnni");
#elif defined(__ARM_NEON)
    // Every 64-bit ARM has it, so what the compiler says holds at run time too.
    features.emplace_back("neon");
#endif
    return features;
}

std::string machine() {
    std::string text = "unknown CPU";
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos) {
            text = line.substr(line.find(": ") + 2);
            break;
        }
    for (const std::string& feature : cpu_features()) text += " " + feature;
    return text;
}

}  // namespace cofire
