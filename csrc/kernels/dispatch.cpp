// Which leaves this build has, and which of them this CPU can run.
#include <cstring>

#include "../cpu.h"
#include "leaf.h"

namespace cofire {

#define COFIRE_DECLARE(isa) \
    namespace isa {         \
    extern const Leaf leaf; \
    }

#if defined(__x86_64__)
COFIRE_DECLARE(v2)
COFIRE_DECLARE(v3)
COFIRE_DECLARE(v4)

namespace {
bool runs(const Leaf* leaf) { return runs_level(leaf->name, cpu_features()); }
const Leaf* const kLeaves[] = {&v4::leaf, &v3::leaf, &v2::leaf};
}  // namespace

#else
COFIRE_DECLARE(base)  // on 64-bit ARM that is NEON

namespace {
bool runs(const Leaf*) { return true; }
const Leaf* const kLeaves[] = {&base::leaf};
}  // namespace

#endif

const Leaf* find_leaf(const char* name) {
    for (const Leaf* leaf : kLeaves)
        if (runs(leaf) && (*name == '\0' || std::strcmp(name, leaf->name) == 0)) return leaf;
    return nullptr;
}

}  // namespace cofire
