// The inner loops on bytes. The rules of leaf.h hold here too.
#pragma once

#include <cstdint>

namespace cofire {

constexpr int kSlack8 = 64;  // bytes of room after every array of bytes that a leaf reads

// The microkernels on bytes of one instruction set.
struct Leaf8 {
    const char* name;
};

// The named set, or the best for this CPU if the name is empty; null if it is not there.
const Leaf8* find_leaf8(const char* name);

// The set that belongs to the kernels of an engine: on a CPU with VNNI, that of "v4" uses it.
const Leaf8* leaf8_of(const char* leaf);

}  // namespace cofire
