// Which leaves on bytes this build has, and which of them this CPU can run.
#include <algorithm>
#include <cstring>

#include "../cpu.h"
#include "leaf8.h"

namespace cofire {

#define COFIRE_DECLARE(isa)   \
    namespace isa {           \
    extern const Leaf8 leaf8; \
    }

#if defined(__x86_64__)
COFIRE_DECLARE(v2)
COFIRE_DECLARE(v3)
COFIRE_DECLARE(v4)
COFIRE_DECLARE(vnni)

namespace {
// "vnni" is v4 with what Ice Lake and Zen 4 added to it.
bool runs(const Leaf8* leaf) {
    const std::vector<std::string> features = cpu_features();
    if (leaf != &vnni::leaf8) return runs_level(leaf->name, features);
    const auto has = [&](const char* name) {
        return std::find(features.begin(), features.end(), name) != features.end();
    };
    return runs_level("v4", features) && has("avx512vnni") && has("avx512vbmi") && has("avx512vbmi2");
}
const Leaf8* const kLeaves[] = {&vnni::leaf8, &v4::leaf8, &v3::leaf8, &v2::leaf8};
}  // namespace

#else
COFIRE_DECLARE(base)

namespace {
bool runs(const Leaf8*) { return true; }
const Leaf8* const kLeaves[] = {&base::leaf8};
}  // namespace

#endif

const Leaf8* find_leaf8(const char* name) {
    for (const Leaf8* leaf : kLeaves)
        if (runs(leaf) && (*name == '\0' || std::strcmp(name, leaf->name) == 0)) return leaf;
    return nullptr;
}

const Leaf8* leaf8_of(const char* leaf) {
    const Leaf8* better = std::strcmp(leaf, "v4") == 0 ? find_leaf8("vnni") : nullptr;
    return better ? better : find_leaf8(leaf);
}

}  // namespace cofire
