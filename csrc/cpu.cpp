#include "cpu.h"

#include <algorithm>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "zen5.h"

namespace cofire {

namespace {

enum class Keeps { nothing, avx, avx512 };  // registers that the operating system must keep

struct Feature {
    const char* name;
    int level;  // of x86-64 that has it; 0: none
    uint32_t CpuAnswers::* word;
    int bit;
    Keeps keeps;
};

constexpr Feature kFeatures[] = {
    {"sse3", 2, &CpuAnswers::leaf1_ecx, 0, Keeps::nothing},
    {"ssse3", 2, &CpuAnswers::leaf1_ecx, 9, Keeps::nothing},
    {"cx16", 2, &CpuAnswers::leaf1_ecx, 13, Keeps::nothing},
    {"sse4.1", 2, &CpuAnswers::leaf1_ecx, 19, Keeps::nothing},
    {"sse4.2", 2, &CpuAnswers::leaf1_ecx, 20, Keeps::nothing},
    {"popcnt", 2, &CpuAnswers::leaf1_ecx, 23, Keeps::nothing},
    {"lahf", 2, &CpuAnswers::extended_ecx, 0, Keeps::nothing},
    {"movbe", 3, &CpuAnswers::leaf1_ecx, 22, Keeps::nothing},
    {"osxsave", 3, &CpuAnswers::leaf1_ecx, 27, Keeps::nothing},
    {"lzcnt", 3, &CpuAnswers::extended_ecx, 5, Keeps::nothing},
    {"bmi1", 3, &CpuAnswers::leaf7_ebx, 3, Keeps::nothing},
    {"bmi2", 3, &CpuAnswers::leaf7_ebx, 8, Keeps::nothing},
    {"avx", 3, &CpuAnswers::leaf1_ecx, 28, Keeps::avx},
    {"f16c", 3, &CpuAnswers::leaf1_ecx, 29, Keeps::avx},
    {"fma", 3, &CpuAnswers::leaf1_ecx, 12, Keeps::avx},
    {"avx2", 3, &CpuAnswers::leaf7_ebx, 5, Keeps::avx},
    {"avx512f", 4, &CpuAnswers::leaf7_ebx, 16, Keeps::avx512},
    {"avx512dq", 4, &CpuAnswers::leaf7_ebx, 17, Keeps::avx512},
    {"avx512cd", 4, &CpuAnswers::leaf7_ebx, 28, Keeps::avx512},
    {"avx512bw", 4, &CpuAnswers::leaf7_ebx, 30, Keeps::avx512},
    {"avx512vl", 4, &CpuAnswers::leaf7_ebx, 31, Keeps::avx512},
    {"avx512vbmi", 0, &CpuAnswers::leaf7_ecx, 1, Keeps::avx512},
    {"avx512vbmi2", 0, &CpuAnswers::leaf7_ecx, 6, Keeps::avx512},
    {"avx512vnni", 0, &CpuAnswers::leaf7_ecx, 11, Keeps::avx512},
};

// xmm and ymm; and the mask registers, the upper halves of zmm0 to zmm15, zmm16 to zmm31
constexpr uint64_t kAvx = 0x06, kAvx512 = 0xe6;

}  // namespace

std::vector<std::string> features_of(const CpuAnswers& answers) {
    std::vector<std::string> found;
    for (const Feature& feature : kFeatures) {
        const uint64_t needs = feature.keeps == Keeps::avx512 ? kAvx512 : feature.keeps == Keeps::avx ? kAvx : 0;
        if ((answers.*feature.word >> feature.bit & 1) && (answers.kept & needs) == needs)
            found.emplace_back(feature.name);
    }
    return found;
}

bool runs_level(std::string_view level, const std::vector<std::string>& features) {
    const int number = level == "v2" ? 2 : level == "v3" ? 3 : level == "v4" ? 4 : 0;
    return number > 0 && std::all_of(std::begin(kFeatures), std::end(kFeatures), [&](const Feature& feature) {
               const bool needed = feature.level > 0 && feature.level <= number;
               return !needed || std::find(features.begin(), features.end(), feature.name) != features.end();
           });
}

namespace {

std::vector<std::string> asked_features() {
#if defined(__x86_64__)
    CpuAnswers answers{};
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) answers.leaf1_ecx = ecx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) answers.leaf7_ebx = ebx, answers.leaf7_ecx = ecx;
    if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx)) answers.extended_ecx = ecx;
    if (answers.leaf1_ecx >> 27 & 1) {  // osxsave: xgetbv is there
        asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
        answers.kept = uint64_t(edx) << 32 | eax;
    }
    return features_of(answers);
#elif defined(__ARM_NEON)
    // Every 64-bit ARM has it, so what the compiler says holds at run time too.
    return {"neon"};
#else
    return {};
#endif
}

}  // namespace

std::vector<std::string> cpu_features() {
    // Asked at run time: the machine that runs a wheel is not the one that built it. And once: a virtual machine's
    // CPU is slow to answer.
    static const std::vector<std::string> features = asked_features();
    return features;
}

int amd_family(uint32_t leaf1_eax) { return int(leaf1_eax >> 8 & 15) + int(leaf1_eax >> 20 & 255); }

namespace {

bool asked_zen5() {
#if defined(__x86_64__)
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx) return false;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && amd_family(eax) == 26;
#else
    return false;
#endif
}

}  // namespace

bool is_zen5 = asked_zen5();

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
