// Tests of which kernels a CPU may run, on answers of CPUs that we do not have. Prints the failures; exit code 0 if
// none.
#include <algorithm>

#include "../cpu.h"
#include "checking.h"

namespace cofire::test {
namespace {

using Features = std::vector<std::string>;

// The lists of the x86-64 psABI, each level with all that comes before.
const Features kV2{"cx16", "lahf", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"};
const Features kV3{"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "osxsave"};
const Features kV4{"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"};

Features joined(std::initializer_list<Features> lists) {
    Features all;
    for (const Features& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
}

Features without(Features features, const std::string& name) {
    features.erase(std::find(features.begin(), features.end(), name));
    return features;
}

bool has(const Features& features, const char* name) {
    return std::find(features.begin(), features.end(), name) != features.end();
}

void test_levels() {
    const Features v3 = joined({kV2, kV3}), v4 = joined({kV2, kV3, kV4});
    CHECK(runs_level("v2", kV2) && !runs_level("v3", kV2) && !runs_level("v4", kV2));
    CHECK(runs_level("v2", v3) && runs_level("v3", v3) && !runs_level("v4", v3));
    CHECK(runs_level("v2", v4) && runs_level("v3", v4) && runs_level("v4", v4));
    CHECK(!runs_level("v1", v4) && !runs_level("", v4) && !runs_level("v2", {}));
    for (const std::string& bit : kV2)
        CHECK(!runs_level("v2", without(v4, bit)) && !runs_level("v4", without(v4, bit)));
    for (const std::string& bit : kV3) {
        CHECK(!runs_level("v3", without(v4, bit)) && !runs_level("v4", without(v4, bit)));
        CHECK(runs_level("v2", without(v4, bit)));
    }
    for (const std::string& bit : kV4) CHECK(!runs_level("v4", without(v4, bit)) && runs_level("v3", without(v4, bit)));
}

void test_answers() {
    CHECK(features_of({0, 0, 0, 0, 0xe7}).empty());
    const CpuAnswers all{~0u, ~0u, ~0u, ~0u, 0xe7};
    CHECK(runs_level("v4", features_of(all)) && has(features_of(all), "avx512vnni"));
    // An operating system that keeps less: the registers of AVX-512, or of AVX too, cannot be used.
    CpuAnswers old = all;
    old.kept = 0x07;
    CHECK(runs_level("v3", features_of(old)) && !has(features_of(old), "avx512f"));
    old.kept = 0x67;  // not zmm16 to zmm31
    CHECK(!runs_level("v4", features_of(old)));
    old.kept = 0x03;
    CHECK(runs_level("v2", features_of(old)) && !runs_level("v3", features_of(old)));
    CHECK(!has(features_of(old), "avx2") && !has(features_of(old), "fma") && has(features_of(old), "bmi2"));
    // Single bits, by Intel's manual.
    CHECK(features_of({1u << 12, 0, 0, 0, 7}) == Features{"fma"});
    CHECK(features_of({1u << 22, 0, 0, 0, 0}) == Features{"movbe"});
    CHECK(features_of({1u << 29, 0, 0, 0, 7}) == Features{"f16c"});
    CHECK(features_of({0, 1u << 3, 0, 0, 0}) == Features{"bmi1"});
    CHECK(features_of({0, 1u << 5, 0, 0, 7}) == Features{"avx2"});
    CHECK(features_of({0, 1u << 8, 0, 0, 0}) == Features{"bmi2"});
    CHECK(features_of({0, 1u << 28, 0, 0, 0xe7}) == Features{"avx512cd"});
    CHECK(features_of({0, 0, 1u << 1, 0, 0xe7}) == Features{"avx512vbmi"});
    CHECK(features_of({0, 0, 1u << 6, 0, 0xe7}) == Features{"avx512vbmi2"});
    CHECK(features_of({0, 0, 1u << 11, 0, 0xe7}) == Features{"avx512vnni"});
    CHECK(features_of({0, 0, 0, 1u << 5, 0}) == Features{"lzcnt"});
}

// Milan, Genoa, Turin.
void test_families() {
    CHECK(amd_family(0x00a00f11) == 25 && amd_family(0x00a10f11) == 25 && amd_family(0x00b00f21) == 26);
}

// What the compiler's own question says about this machine, for the names that old compilers know.
void test_this_machine() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const Features found = cpu_features();
    CHECK(has(found, "sse4.2") == bool(__builtin_cpu_supports("sse4.2")));
    CHECK(has(found, "avx") == bool(__builtin_cpu_supports("avx")));
    CHECK(has(found, "avx2") == bool(__builtin_cpu_supports("avx2")));
    CHECK(has(found, "fma") == bool(__builtin_cpu_supports("fma")));
    CHECK(has(found, "bmi1") == bool(__builtin_cpu_supports("bmi")));
    CHECK(has(found, "bmi2") == bool(__builtin_cpu_supports("bmi2")));
    CHECK(has(found, "avx512f") == bool(__builtin_cpu_supports("avx512f")));
    CHECK(has(found, "avx512vl") == bool(__builtin_cpu_supports("avx512vl")));
    CHECK(has(found, "avx512vnni") == bool(__builtin_cpu_supports("avx512vnni")));
#endif
}

}  // namespace
}  // namespace cofire::test

int main() {
    cofire::test::test_levels();
    cofire::test::test_answers();
    cofire::test::test_families();
    cofire::test::test_this_machine();
    return cofire::test::summary();
}
