// Heads in bytes. Of a quantised model the weights of each row are whole numbers of up to 127 times a factor: a quarter
// of the bytes say the same, and at batch 1 all of them come from memory for every image.
#pragma once

#include <cstdint>
#include <vector>

#include "floats.h"
#include "kernels/kernels8.h"
#include "program.h"

namespace cofire {

constexpr int kNumberBytes = 3;

struct Head8 {
    const int8_t* weight = nullptr;  // (rows, pitch), zeros behind the inputs; null: the head's are no such numbers
    int64_t pitch = 0;               // whole cache lines
    std::vector<float> factor;       // of each row,
    std::vector<int32_t> total;      // what its numbers add up to,
    std::vector<int32_t> lacks;      // and what Kernels8::dot leaves out of their products
};

// Of the head of an op that decides. Only heads that read bytes, whose sums cannot overflow.
Head8 head8_of(const Program& program, const Head& head, const Kernels8& kernels, Arena& arena);

// A head's inputs as whole numbers of kNumberBytes, x = low + number * step: of the largest, that says as much as a
// float. Byte b of all of them lies at planes + b * pitch, zeros behind them. Sums of such numbers with those of a row
// are exact, in any order.
struct WholeInputs {
    double low, step;

    WholeInputs(const float* x, int n, int64_t pitch, uint8_t* planes);
};

}  // namespace cofire
