// Heads in bytes. Of a quantised model the weights of each row are whole numbers of up to 127 times a factor: a quarter
// of the bytes say the same, and at batch 1 all of them come from memory for every image.
#pragma once

#include <cstdint>
#include <vector>

#include "floats.h"
#include "program.h"

namespace cofire {

struct Head8 {
    const int8_t* weight = nullptr;  // (rows, inputs); null: the head's weights are no such numbers
    std::vector<float> factor;       // of each row
};

// Of the head of an op that decides. Only heads that read bytes, whose sums cannot overflow.
Head8 head8_of(const Program& program, const Head& head, Arena& arena);

}  // namespace cofire
