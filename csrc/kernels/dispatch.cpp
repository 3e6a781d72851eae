// Which kernels this build has, and which of them this CPU can run.
#include <cstring>

#include "../cpu.h"
#include "kernels.h"

namespace cofire {

#define COFIRE_DECLARE(isa)       \
    namespace isa {               \
    extern const Kernels kernels; \
    }

#if defined(__x86_64__)
COFIRE_DECLARE(v2)
COFIRE_DECLARE(v3)
COFIRE_DECLARE(v4)

namespace {
bool runs(const Kernels* kernels) { return runs_level(kernels->name, cpu_features()); }
const Kernels* const kSets[] = {&v4::kernels, &v3::kernels, &v2::kernels};
}  // namespace

#else
COFIRE_DECLARE(base)  // on 64-bit ARM that is NEON

namespace {
bool runs(const Kernels*) { return true; }
const Kernels* const kSets[] = {&base::kernels};
}  // namespace

#endif

const Kernels* find_kernels(const char* name) {
    for (const Kernels* kernels : kSets)
        if (runs(kernels) && (*name == '\0' || std::strcmp(name, kernels->name) == 0)) return kernels;
    return nullptr;
}

}  // namespace cofire
