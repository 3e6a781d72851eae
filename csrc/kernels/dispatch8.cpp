// Which kernels on bytes this build has, and which of them this CPU can run.
#include <algorithm>
#include <cstring>

#include "../cpu.h"
#include "kernels8.h"

namespace cofire {

#define COFIRE_DECLARE(isa)         \
    namespace isa {                 \
    extern const Kernels8 kernels8; \
    }

#if defined(__x86_64__)
COFIRE_DECLARE(v2)
COFIRE_DECLARE(v3)
COFIRE_DECLARE(v4)
COFIRE_DECLARE(vnni)

namespace {
// "vnni" is v4 with what Ice Lake and Zen 4 added to it.
bool runs(const Kernels8* kernels) {
    const std::vector<std::string> features = cpu_features();
    if (kernels != &vnni::kernels8) return runs_level(kernels->name, features);
    const auto has = [&](const char* name) {
        return std::find(features.begin(), features.end(), name) != features.end();
    };
    return runs_level("v4", features) && has("avx512vnni") && has("avx512vbmi") && has("avx512vbmi2");
}
const Kernels8* const kSets[] = {&vnni::kernels8, &v4::kernels8, &v3::kernels8, &v2::kernels8};
}  // namespace

#else
COFIRE_DECLARE(base)

namespace {
bool runs(const Kernels8*) { return true; }
const Kernels8* const kSets[] = {&base::kernels8};
}  // namespace

#endif

const Kernels8* find_kernels8(const char* name) {
    for (const Kernels8* kernels : kSets)
        if (runs(kernels) && (*name == '\0' || std::strcmp(name, kernels->name) == 0)) return kernels;
    return nullptr;
}

const Kernels8* kernels8_of(const char* kernels) {
    const Kernels8* better = std::strcmp(kernels, "v4") == 0 ? find_kernels8("vnni") : nullptr;
    return better ? better : find_kernels8(kernels);
}

}  // namespace cofire
