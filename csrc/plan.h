// Everything about a program that is known before the first image: where buffers lie, what of them heads will want.
#pragma once

#include <cstdint>
#include <vector>

#include "program.h"

namespace cofire {

struct Plan {
    explicit Plan(const Program& program);

    int64_t floats = 0;            // for all buffers of one image
    std::vector<int64_t> offsets;  // of each buffer; those that are never needed together share memory
    std::vector<char> peaked;      // buffers whose maxima a head reads and whose writers, convs, can keep them
    std::vector<char> summed;      // the same for sums over space
    std::vector<char> plain;       // ops whose heads find no number below zero: each is its own magnitude
    std::vector<char> untouched;   // ops that leave their residual as it is, in place, where a filter is off
};

}  // namespace cofire
