// Which leaves on bytes this build has, and which of them this CPU can run.
#include <cstring>

#include "leaf8.h"

namespace cofire {

namespace {
const Leaf8 kPlain{"plain"};
}

const Leaf8* find_leaf8(const char* name) {
    return *name == '\0' || std::strcmp(name, kPlain.name) == 0 ? &kPlain : nullptr;
}

const Leaf8* leaf8_of(const char*) { return &kPlain; }

}  // namespace cofire
